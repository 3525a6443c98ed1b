//! The codec of the wire: that of prost, with buffers of a size that a session needs.
//!
//! tonic gives each direction of a stream 8 KiB for as long as it lives. A node's frames are a few hundred bytes, and
//! thousands of nodes may live in one process; a larger message makes its buffer grow as before.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::ProstCodec;

/// Bytes of a new buffer.
const FIRST: usize = 1 << 10;
/// Encoded bytes that are handed on together at most, as tonic has it by default.
const TOGETHER: usize = 32 << 10;

/// Named by the generated clients and servers (`build.rs`): encodes `E`, decodes `D`.
#[derive(Debug)]
pub struct FrameCodec<E, D>(PhantomData<(E, D)>);

impl<E, D> Default for FrameCodec<E, D> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<E, D> Codec for FrameCodec<E, D>
where
    E: Message + Send + 'static,
    D: Message + Default + Send + 'static,
{
    type Encode = E;
    type Decode = D;
    type Encoder = <ProstCodec<E, D> as Codec>::Encoder;
    type Decoder = <ProstCodec<E, D> as Codec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<E, D>::raw_encoder(BufferSettings::new(FIRST, TOGETHER))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<E, D>::raw_decoder(BufferSettings::new(FIRST, TOGETHER))
    }
}
