//! Mutations: what is changed in an entry of a corpus. proptest draws them and, when a property fails, makes them fewer
//! and smaller.

use proptest::collection::vec;
use proptest::prelude::*;

use crate::grammar::{Body, Format, Node, guess, parse, print, put_varint};

/// What a mutation may make of an entry, bytes: of a frame its limit and more, of what lies within one enough to see how memory
/// grows with it.
fn largest(format: Format) -> usize {
    if format == Format::Proto { 5 << 20 } else { 64 << 10 }
}

/// Copies of one node.
const COPIES: u32 = 40_000;
/// Copies are seldom many: each costs as much as a thousand others.
const MANY_ONCE_IN: u32 = 64;
const NESTED: u32 = 400;

/// A change; what each number means is the change's to say.
#[derive(Debug, Clone)]
pub struct Edit {
    what: u8,
    at: u32,
    size: u32,
    value: u64,
}

/// Some of them.
pub fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let one = (0..24_u8, any::<u32>(), any::<u32>(), any::<u64>());
    vec(one.prop_map(|(what, at, size, value)| Edit { what, at, size, value }), 1..6)
}

/// The entry with these changes; `other` is an entry that parts may be taken from.
pub fn apply(entry: &[u8], other: &[u8], format: Format, edits: &[Edit]) -> Vec<u8> {
    let mut bytes = entry.to_vec();
    for edit in edits {
        bytes = mutate(&bytes, other, format, edit);
        bytes.truncate(largest(format));
    }
    bytes
}

fn mutate(bytes: &[u8], other: &[u8], format: Format, edit: &Edit) -> Vec<u8> {
    let tree = if edit.what < 16 { parse(format, bytes) } else { None };
    let Some(mut tree) = tree else { return blind(bytes, other, edit) };
    let count = count(&tree);
    if count == 0 {
        return blind(bytes, other, edit);
    }
    let donor = parse(format, other).and_then(|tree| nth(&tree, edit.value)).unwrap_or_else(stranger);
    let mut left = edit.at as usize % count;
    in_nodes(&mut tree, &mut left, &mut |nodes, at| {
        change(nodes, at, &donor, format, edit);
    });
    print(format, &tree)
}

fn stranger() -> Node {
    Node { head: Vec::new(), body: Body::Leaf(b"1".to_vec()) }
}

fn count(body: &Body) -> usize {
    body.nodes().iter().map(|node| 1 + count(&node.body)).sum()
}

fn nth(tree: &Body, wanted: u64) -> Option<Node> {
    let mut copy = tree.clone();
    let count = count(tree) as u64;
    let mut left = usize::try_from(wanted.checked_rem(count)?).ok()?;
    let mut found = None;
    in_nodes(&mut copy, &mut left, &mut |nodes, at| found = Some(nodes[at].clone()));
    found
}

/// Calls `act` with the node behind `left` others and its neighbours.
fn in_nodes(body: &mut Body, left: &mut usize, act: &mut dyn FnMut(&mut Vec<Node>, usize)) -> bool {
    let Some(nodes) = body.nodes_mut() else { return false };
    for at in 0..nodes.len() {
        if *left == 0 {
            act(nodes, at);
            return true;
        }
        *left -= 1;
        if in_nodes(&mut nodes[at].body, left, act) {
            return true;
        }
    }
    false
}

/// Changes a node where it stands.
fn change(nodes: &mut Vec<Node>, at: usize, donor: &Node, format: Format, edit: &Edit) {
    let edit_of_leaf = Edit { what: (edit.value >> 56) as u8 % 24, ..edit.clone() };
    match edit.what {
        0..5 => match &mut nodes[at].body {
            Body::Leaf(bytes) => *bytes = in_leaf(bytes, format, &edit_of_leaf),
            body => *body = Body::Leaf(blind(&print(format, body), &[], &edit_of_leaf)),
        },
        5 => nodes.insert(at, nodes[at].clone()),
        6 => {
            let copies = if edit.value.is_multiple_of(u64::from(MANY_ONCE_IN)) {
                edit.size % COPIES
            } else {
                edit.size % 8
            };
            let copy = nodes[at].clone();
            let room = largest(format) / (print(format, &copy.body).len() + 2);
            let copies = (copies as usize).min(room);
            nodes.splice(at..at, std::iter::repeat_n(copy, copies));
        }
        7 => drop(nodes.remove(at)),
        8 => nodes[at].body = donor.body.clone(),
        9 => {
            let depth = if edit.value.is_multiple_of(8) { edit.size % NESTED } else { edit.size % 4 };
            for _ in 0..depth {
                let head = nodes[at].head.clone();
                let inner = std::mem::replace(&mut nodes[at].body, Body::List(Vec::new()));
                nodes[at].body = Body::Nodes(vec![Node { head, body: inner }]);
            }
        }
        10 => nodes[at].head = head(&nodes[at].head, format, edit),
        11 => {
            let head = head(&nodes[at].head, format, edit);
            nodes.insert(at, Node { head, body: donor.body.clone() });
        }
        12 => nodes[at].body = Body::Leaf(extreme(format, edit)),
        13 => {
            let with = edit.size as usize % nodes.len();
            nodes.swap(at, with);
        }
        14 => {
            nodes[at].body =
                if format == Format::Json { Body::List(Vec::new()) } else { Body::Leaf(Vec::new()) }
        }
        _ => {
            let listed = std::mem::replace(&mut nodes[at].body, Body::Leaf(Vec::new()));
            nodes[at].body = match listed {
                // A struct's fields by their place.
                Body::Nodes(inner) if format == Format::Json => {
                    Body::List(inner.into_iter().map(keyless).collect())
                }
                other => other,
            };
        }
    }
}

fn keyless(node: Node) -> Node {
    Node { head: Vec::new(), ..node }
}

/// A leaf may be a document of its own, or base64 of one.
fn in_leaf(bytes: &[u8], format: Format, edit: &Edit) -> Vec<u8> {
    let quoted = format == Format::Json && bytes.len() >= 2 && bytes.starts_with(b"\"");
    if quoted {
        let inner = &bytes[1..bytes.len() - 1];
        if let Ok(binary) = data_encoding::BASE64.decode(inner)
            && binary.len() > 32
        {
            let changed = mutate(&binary, &[], guess(&binary), edit);
            return format!("\"{}\"", data_encoding::BASE64.encode(&changed)).into_bytes();
        }
        return [b"\"", &*blind(inner, &[], edit), b"\""].concat();
    }
    mutate(bytes, &[], guess(bytes), edit)
}

/// Another key, field or tag.
fn head(head: &[u8], format: Format, edit: &Edit) -> Vec<u8> {
    match format {
        Format::Json => match edit.size % 3 {
            // The same key, written otherwise.
            0 if head.len() > 2 => {
                [b"\"\\u00", &*format!("{:02x}", head[1]).into_bytes(), &head[2..]].concat()
            }
            1 => b"\"stranger\"".to_vec(),
            _ => b"\"args\"".to_vec(),
        },
        Format::Proto => {
            let mut out = Vec::new();
            let number = if edit.size.is_multiple_of(2) { edit.value % 32 } else { edit.value >> 35 };
            put_varint((number << 3) | (u64::from(edit.size >> 8) % 6), &mut out);
            out
        }
        _ => vec![edit.value.to_le_bytes()[0]],
    }
}

fn extreme(format: Format, edit: &Edit) -> Vec<u8> {
    const NUMBERS: [&str; 9] = [
        "18446744073709551615",
        "18446744073709551616",
        "-1",
        "1e999",
        "0",
        "-0",
        "1.5",
        "null",
        "9223372036854775807",
    ];
    match format {
        Format::Json => NUMBERS[edit.size as usize % NUMBERS.len()].as_bytes().to_vec(),
        Format::Proto => {
            let mut out = Vec::new();
            put_varint([u64::MAX, 0, 1 << 31, 1 << 63][edit.size as usize % 4], &mut out);
            out
        }
        _ => edit.value.to_be_bytes().to_vec(),
    }
}

/// What a mutation puts among bytes whose shape it does not know.
const WORDS: &[&[u8]] = &[
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\xff\xff\xff\xff\x0f",
    b"\x00",
    b"\x80",
    b"\x7f\xff\xff\xff",
    b"\x84\xff\xff\xff\xff",
    b"\0\0\0\0",
    b"\"",
    b"\\u0000",
    b"\n",
    b"..",
    b"/",
    b"{\"a\":",
    b"[",
    b"1e999",
    b",\"node_id\":\"n-2\"",
    b"n-2",
    b"spiffe://lab.example/node/fra1/n-2",
    b"2026-11-29T10:00:00Z",
    b"\xf0\x9f\x98\x80",
];

/// Changes bytes whose shape is not known.
fn blind(bytes: &[u8], other: &[u8], edit: &Edit) -> Vec<u8> {
    let mut out = bytes.to_vec();
    let at = edit.at as usize % (out.len() + 1);
    let to = (at + 1 + edit.size as usize % 24).min(out.len());
    match edit.what % 8 {
        0 | 1 if at < out.len() => out[at] ^= 1 << (edit.value % 8),
        2 if at < out.len() => out[at] = edit.value.to_le_bytes()[0],
        3 => out.truncate(at),
        4 => drop(out.drain(at..to)),
        5 => {
            let piece = out[at..to].to_vec();
            let times = if edit.value.is_multiple_of(64) { edit.size as usize % 2000 } else { 1 };
            out.splice(at..at, piece.repeat(times));
        }
        6 if !other.is_empty() => {
            out.truncate(at);
            out.extend(&other[edit.size as usize % other.len()..]);
        }
        _ => {
            let word = WORDS[edit.size as usize % WORDS.len()];
            let over = if edit.value.is_multiple_of(2) { to.min(at + word.len()) } else { at };
            out.splice(at..over, word.iter().copied());
        }
    }
    out
}
