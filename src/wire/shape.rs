//! How many elements a message would have, counted on its bytes: a submessage of two bytes becomes a struct of a hundred, so
//! that the limit on a frame's bytes alone lets a peer take a hundred times as much memory.
//!
//! The shapes come from the descriptors of `proto/` (build.rs): of each message the fields that are repeated or messages.

use prost::Message;

use super::pb;
use crate::model::limits::FRAME_ELEMENTS;

/// Fields that are repeated or messages: number, and the shape of a message.
pub struct Shape(&'static [(u32, Option<&'static Shape>)]);

/// An entry of a map.
static ENTRY: Shape = Shape(&[]);

/// A message whose shape is known.
pub trait Shaped: Message + Default {
    /// Its shape.
    fn shape() -> &'static Shape;
}

include!(concat!(env!("OUT_DIR"), "/shapes.rs"));

/// Why a message is not decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// It would take much more memory than bytes.
    #[error("a message has over {FRAME_ELEMENTS} elements")]
    TooMany,
    /// It is no such message.
    #[error("a message cannot be read")]
    Malformed(#[from] prost::DecodeError),
}

/// Decodes a message that came within bytes of another one.
///
/// # Errors
/// See [`ShapeError`].
pub fn decode<T: Shaped>(bytes: &[u8]) -> Result<T, ShapeError> {
    check::<T>(bytes)?;
    Ok(T::decode(bytes)?)
}

/// Whether a message has few enough elements to be decoded.
///
/// # Errors
/// It has too many.
pub fn check<T: Shaped>(bytes: &[u8]) -> Result<(), ShapeError> {
    let mut left = FRAME_ELEMENTS;
    count(T::shape(), bytes, &mut left).map(|_| ())
}

/// Takes the elements off `left`. None: what follows is malformed, which the decoder will say.
fn count(shape: &Shape, mut rest: &[u8], left: &mut usize) -> Result<Option<()>, ShapeError> {
    while !rest.is_empty() {
        let Some(key) = varint(&mut rest) else { return Ok(None) };
        let length = match key & 7 {
            0 => varint(&mut rest).map(|_| 0),
            1 => Some(8),
            2 => varint(&mut rest).and_then(|length| usize::try_from(length).ok()),
            5 => Some(4),
            // Groups are in no message of ours; what is skipped takes no memory.
            3 | 4 => Some(0),
            _ => None,
        };
        let Some((value, behind)) = length.and_then(|length| rest.split_at_checked(length)) else {
            return Ok(None);
        };
        rest = behind;
        let Some((_, inner)) = shape.0.iter().find(|(number, _)| u64::from(*number) == key >> 3) else {
            continue;
        };
        *left = left.checked_sub(1).ok_or(ShapeError::TooMany)?;
        if let Some(inner) = inner {
            count(inner, value, left)?;
        }
    }
    Ok(Some(()))
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for at in 0..10 {
        let (byte, behind) = rest.split_first()?;
        *rest = behind;
        value |= u64::from(byte & 0x7f) << (7 * at);
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::limits::HELLO_RESULTS_BYTES;

    #[test]
    fn elements_are_counted_in_every_message_and_list_below_a_frame() {
        let signatures =
            |count| pb::Envelope { signatures: vec![pb::Signature::default(); count], ..Default::default() };
        let command = |count| pb::Command { approvals: vec![signatures(count)], ..Default::default() };
        let frame =
            |count| pb::GatewayFrame { frame: Some(pb::gateway_frame::Frame::Command(command(count))) };
        // The frame's command and its approval are elements, too.
        let at_most = FRAME_ELEMENTS - 2;
        assert_eq!(decode(&frame(at_most).encode_to_vec()), Ok(frame(at_most)));
        let refused = decode::<pb::GatewayFrame>(&frame(at_most + 1).encode_to_vec()).unwrap_err();
        assert_eq!(refused, ShapeError::TooMany);
        let ids = pb::Ack { result_ids: vec![String::new(); FRAME_ELEMENTS + 1], ..Default::default() };
        assert_eq!(check::<pb::Ack>(&ids.encode_to_vec()), Err(ShapeError::TooMany));
        let entries = vec![[0x4a, 0]; FRAME_ELEMENTS + 1].concat();
        assert_eq!(check::<pb::Welcome>(&entries), Err(ShapeError::TooMany));
    }

    #[test]
    fn the_largest_hello_of_a_node_passes() {
        let result = pb::CommandUpdate {
            body_sha256: vec![1; 32].into(),
            progress: Some(Default::default()),
            ..Default::default()
        };
        let hello = pb::Hello { done_results: vec![result; HELLO_RESULTS_BYTES / 32], ..Default::default() };
        let frame = pb::NodeFrame { frame: Some(pb::node_frame::Frame::Hello(hello)) };
        assert_eq!(check::<pb::NodeFrame>(&frame.encode_to_vec()), Ok(()));
    }

    #[test]
    fn what_is_malformed_is_left_to_the_decoder() {
        for bytes in [&[0x0a][..], &[0x0a, 0xff], &[0xff; 11], &[0x07], &[0x0a, 0x02, 0x0a, 0x7f]] {
            assert_eq!(check::<pb::GatewayFrame>(bytes), Ok(()), "{bytes:?}");
            assert!(matches!(decode::<pb::GatewayFrame>(bytes), Err(ShapeError::Malformed(_))), "{bytes:?}");
        }
    }
}
