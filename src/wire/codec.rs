//! The codec of the wire: that of prost, with buffers of a size that a session needs, and with a bound on what a message
//! takes in memory ([`super::shape`]).
//!
//! tonic gives each direction of a stream 8 KiB for as long as it lives. A node's frames are a few hundred bytes, and
//! thousands of nodes may live in one process; a larger message makes its buffer grow as before.

use std::marker::PhantomData;

use bytes::Buf as _;
use prost::Message;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder};
use tonic_prost::ProstCodec;

use super::shape::{self, Shaped};

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
    D: Shaped + Send + 'static,
{
    type Encode = E;
    type Decode = D;
    type Encoder = <ProstCodec<E, D> as Codec>::Encoder;
    type Decoder = Bounded<<ProstCodec<E, D> as Codec>::Decoder>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<E, D>::raw_encoder(BufferSettings::new(FIRST, TOGETHER))
    }

    fn decoder(&mut self) -> Self::Decoder {
        Bounded(ProstCodec::<E, D>::raw_decoder(BufferSettings::new(FIRST, TOGETHER)))
    }
}

/// Decodes what is within the bounds of memory.
#[derive(Debug)]
pub struct Bounded<D>(D);

impl<D> Decoder for Bounded<D>
where
    D: Decoder<Error = Status>,
    D::Item: Shaped,
{
    type Item = D::Item;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<D::Item>, Status> {
        // The whole message: tonic gathers it in one buffer. As for one that is too long, the code is all that a peer is told.
        let whole = bytes.chunk();
        shape::check::<D::Item>(whole).map_err(|error| Status::out_of_range(error.to_string()))?;
        self.0.decode(bytes)
    }

    fn buffer_settings(&self) -> BufferSettings {
        self.0.buffer_settings()
    }
}
