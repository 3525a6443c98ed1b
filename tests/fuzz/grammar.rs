//! JSON, protobuf and DER as one kind of tree, so that a mutation can double a key, nest a value or lengthen a field and
//! every length around it stays true: blind changes alone break the outermost wrapping and get no further.
//!
//! It is also what strict parsers are held against: it keeps doubled keys, and is nobody's parser but the tests'.

/// How bytes are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// An object.
    Json,
    /// A message's fields.
    Proto,
    /// Tags, lengths and values.
    Der,
    /// No structure that is known here.
    Bytes,
}

/// A member, field or value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// JSON: its key as it is written, empty in a list. Protobuf: number and type. DER: the tag.
    pub head: Vec<u8>,
    /// What it holds.
    pub body: Body,
}

/// What a node holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body {
    /// As it is written, without its length.
    Leaf(Vec<u8>),
    /// JSON: an object.
    Nodes(Vec<Node>),
    /// JSON: a list. In no other format.
    List(Vec<Node>),
}

/// What nests deeper is a leaf, or nothing at all.
const DEEPEST: usize = 200;
/// The protobuf type of what has a length.
const LENGTH: u64 = 2;
const OCTET_STRING: u8 = 0x04;
const CONSTRUCTED: u8 = 0x20;

impl Body {
    /// Nodes below it, in either form.
    pub fn nodes(&self) -> &[Node] {
        match self {
            Self::Leaf(_) => &[],
            Self::Nodes(nodes) | Self::List(nodes) => nodes,
        }
    }

    /// The same, to be changed.
    pub fn nodes_mut(&mut self) -> Option<&mut Vec<Node>> {
        match self {
            Self::Leaf(_) => None,
            Self::Nodes(nodes) | Self::List(nodes) => Some(nodes),
        }
    }
}

/// Which format bytes seem to be of.
pub fn guess(bytes: &[u8]) -> Format {
    [(b'{', Format::Json), (0x30, Format::Der)]
        .into_iter()
        .find(|(first, format)| bytes.first() == Some(first) && parse(*format, bytes).is_some())
        .map_or(Format::Bytes, |(_, format)| format)
}

/// Reads the whole of the bytes.
pub fn parse(format: Format, bytes: &[u8]) -> Option<Body> {
    match format {
        Format::Json => {
            let mut rest = bytes;
            let body = json(&mut rest, 0)?;
            skip_space(&mut rest);
            rest.is_empty().then_some(body)
        }
        Format::Proto => proto(bytes, 0).map(Body::Nodes),
        Format::Der => der(bytes, 0).map(Body::Nodes),
        Format::Bytes => None,
    }
}

/// Writes it.
pub fn print(format: Format, body: &Body) -> Vec<u8> {
    let mut out = Vec::new();
    write(format, body, &mut out);
    out
}

fn write(format: Format, body: &Body, out: &mut Vec<u8>) {
    let (open, close) = match body {
        Body::Leaf(bytes) => return out.extend(bytes),
        Body::Nodes(_) => (b'{', b'}'),
        Body::List(_) => (b'[', b']'),
    };
    let is_json = format == Format::Json;
    out.extend(is_json.then_some(open));
    for (at, node) in body.nodes().iter().enumerate() {
        if is_json {
            out.extend((at > 0).then_some(b','));
            out.extend(&node.head);
            out.extend((open == b'{').then_some(b':'));
            write(format, &node.body, out);
            continue;
        }
        out.extend(&node.head);
        let value = print(format, &node.body);
        match format {
            Format::Proto if varint(&mut &*node.head).is_some_and(|key| key & 7 == LENGTH) => {
                put_varint(value.len() as u64, out);
            }
            Format::Der => put_length(value.len(), out),
            _ => {}
        }
        out.extend(value);
    }
    out.extend(is_json.then_some(close));
}

fn skip_space(rest: &mut &[u8]) {
    *rest = rest.trim_ascii_start();
}

fn json(rest: &mut &[u8], depth: usize) -> Option<Body> {
    skip_space(rest);
    if depth > DEEPEST {
        return None;
    }
    let close = match rest.first()? {
        b'{' => b'}',
        b'[' => b']',
        b'"' => return text(rest).map(Body::Leaf),
        _ => {
            let end = rest.iter().position(|b| b",]}: \t\r\n".contains(b)).unwrap_or(rest.len());
            let (word, behind) = rest.split_at(end);
            *rest = behind;
            return (!word.is_empty()).then(|| Body::Leaf(word.to_vec()));
        }
    };
    *rest = &rest[1..];
    let mut nodes = Vec::new();
    loop {
        skip_space(rest);
        if rest.first() == Some(&close) {
            *rest = &rest[1..];
            break;
        }
        if !nodes.is_empty() {
            *rest = rest.strip_prefix(b",")?;
            skip_space(rest);
        }
        let mut head = Vec::new();
        if close == b'}' {
            head = text(rest)?;
            skip_space(rest);
            *rest = rest.strip_prefix(b":")?;
        }
        nodes.push(Node { head, body: json(rest, depth + 1)? });
    }
    Some(if close == b'}' { Body::Nodes(nodes) } else { Body::List(nodes) })
}

/// A string with its quotes, as it is written.
fn text(rest: &mut &[u8]) -> Option<Vec<u8>> {
    if rest.first() != Some(&b'"') {
        return None;
    }
    let mut at = 1;
    loop {
        match rest.get(at)? {
            b'\\' => at += 2,
            b'"' => break,
            _ => at += 1,
        }
    }
    let (text, behind) = rest.split_at(at + 1);
    *rest = behind;
    Some(text.to_vec())
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..70).step_by(7) {
        let (byte, behind) = rest.split_first()?;
        *rest = behind;
        value |= u64::from(byte & 0x7f).checked_shl(shift)?;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Writes a number as protobuf does.
pub fn put_varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.push(value.to_le_bytes()[0]);
}

fn proto(mut rest: &[u8], depth: usize) -> Option<Vec<Node>> {
    let mut nodes = Vec::new();
    while !rest.is_empty() {
        let before = rest;
        let key = varint(&mut rest)?;
        let head = before[..before.len() - rest.len()].to_vec();
        let start = rest;
        let length = match key & 7 {
            0 => {
                varint(&mut rest)?;
                start.len() - rest.len()
            }
            1 => 8,
            2 => usize::try_from(varint(&mut rest)?).ok()?,
            5 => 4,
            _ => return None,
        };
        let from = if key & 7 == LENGTH { rest } else { start };
        let (value, behind) = from.split_at_checked(length)?;
        rest = behind;
        let inner = (key & 7 == LENGTH && !value.is_empty() && depth < 12).then(|| proto(value, depth + 1));
        let body = inner.flatten().map_or_else(|| Body::Leaf(value.to_vec()), Body::Nodes);
        nodes.push(Node { head, body });
    }
    Some(nodes)
}

fn der(mut rest: &[u8], depth: usize) -> Option<Vec<Node>> {
    let mut nodes = Vec::new();
    while !rest.is_empty() {
        let (tag, behind) = rest.split_first()?;
        let (first, behind) = behind.split_first()?;
        let (length, behind) = match first {
            0..=0x7f => (usize::from(*first), behind),
            0x81..=0x84 => {
                let (bytes, behind) = behind.split_at_checked(usize::from(first - 0x80))?;
                (bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)), behind)
            }
            _ => return None,
        };
        let (value, behind) = behind.split_at_checked(length)?;
        rest = behind;
        let may = tag & CONSTRUCTED != 0 || (*tag == OCTET_STRING && !value.is_empty());
        let inner = (may && depth < 12).then(|| der(value, depth + 1)).flatten();
        let body = inner.map_or_else(|| Body::Leaf(value.to_vec()), Body::Nodes);
        nodes.push(Node { head: vec![*tag], body });
    }
    Some(nodes)
}

fn put_length(length: usize, out: &mut Vec<u8>) {
    let bytes = length.to_be_bytes();
    let from = bytes.iter().position(|byte| *byte != 0).unwrap_or(bytes.len() - 1);
    let bytes = &bytes[from..];
    if length >= 0x80 {
        out.push(0x80 | u8::try_from(bytes.len()).expect("eight bytes at most"));
    }
    out.extend(bytes);
}

#[test]
fn what_is_read_is_written_again_byte_by_byte() {
    let deep = format!("{}1{}", "[".repeat(50), "]".repeat(50));
    for text in [r#"{"a":1,"a":[true,{"b":"x\"y"}],"c":{}}"#, "[]", "-1e5", &deep] {
        let body = parse(Format::Json, text.as_bytes()).expect(text);
        assert_eq!(String::from_utf8(print(Format::Json, &body)).expect("text"), text);
    }
    for bad in ["{", "[1 2]", r#"{"a" 1}"#, "1 2", ""] {
        assert_eq!(parse(Format::Json, bad.as_bytes()), None, "{bad}");
    }
    let der = [0x30, 0x06, 0x02, 0x01, 0x05, 0x04, 0x01, 0xff];
    assert_eq!(print(Format::Der, &parse(Format::Der, &der).expect("DER")), der);
    let proto = [0x0a, 0x03, b'n', b'-', b'1', 0x10, 0x96, 0x01];
    assert_eq!(print(Format::Proto, &parse(Format::Proto, &proto).expect("fields")), proto);
}
