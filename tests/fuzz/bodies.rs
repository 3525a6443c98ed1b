//! Signed bodies: strict JSON, which says the same to whoever signed it and to whoever reads it.

use std::collections::BTreeSet;

use bcd::model::{Args, Command, Kind, strict};
use bcd::wire::bundle::TrustBundle;
use bcd::wire::dsse::CancelBody;
use bcd::wire::enroll::{JoinAnswer, RejoinProof, RenewAnswer, RenewProof};
use bcd::wire::report::{Leave, SignedResult};
use bcd::wire::revocation::Revocation;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::grammar::{Body, Format, Node, parse, print};
use crate::harness::{Target, corpus};

fn key(head: &[u8]) -> String {
    serde_json::from_slice(head).expect("a key")
}

/// Panics where a key is there twice, or is none that `known` has.
fn strictly(body: &Body, known: &Value) {
    let mut seen = BTreeSet::new();
    for node in body.nodes() {
        let inner = match body {
            Body::Nodes(_) => {
                let key = key(&node.head);
                assert!(seen.insert(key.clone()), "{key:?} is there twice");
                // A name, where an object with that name and nothing says the same.
                let is_name = known.as_str() == Some(&key) && node.body == Body::Leaf(b"null".to_vec());
                assert!(is_name || known.get(&key).is_some(), "{key:?} is unknown");
                &known[key]
            }
            _ => &known[seen.len()],
        };
        strictly(&node.body, inner);
    }
}

/// What a value is, where null and an absent field are one.
fn written<T: Serialize>(value: &T) -> Value {
    serde_json::to_value(value).expect("JSON")
}

/// Whether it is taken as a `T`, and then strictly.
fn taken<T: DeserializeOwned + Serialize>(bytes: &[u8]) -> bool {
    let Ok(value) = strict::parse::<T>(bytes) else { return false };
    let written = written(&value);
    let again = strict::parse::<T>(written.to_string().as_bytes()).expect("our own");
    assert_eq!(written, self::written(&again));
    let tree = parse(Format::Json, bytes).expect("it was taken");
    assert!(matches!(tree, Body::Nodes(_)), "a list for an object");
    strictly_of(&tree, &written);
    true
}

/// Fields that are left out when they are nothing.
fn strictly_of(tree: &Body, written: &Value) {
    let mut known = written.clone();
    for (name, empty) in [("labels", json!({})), ("challenge", json!(null))] {
        if let Some(object) = known.as_object_mut() {
            object.entry(name).or_insert(empty);
        }
    }
    strictly(tree, &known);
}

fn command(bytes: &[u8]) -> bool {
    let Ok(command) = Command::parse(bytes.to_vec().into()) else { return false };
    assert_eq!(&*command.payload, bytes);
    let header = &command.header;
    assert!(!header.id.as_str().contains("..") && header.id.as_str().len() <= 128);
    let mut taken = false;
    for kind in Kind::ALL.iter().copied() {
        let Ok(body) = command.body(kind) else { continue };
        assert_eq!(body.args.kind(), kind);
        let args = match &body.args {
            Args::Probe(_) => json!({}),
            Args::Barrier(args) => json!({ "barrier_id": args.barrier_id }),
            Args::Reboot(args) => json!({ "delay_s": args.delay_s, "drain_s": args.drain_s }),
            Args::Exec(args) => written(&**args),
        };
        let known = json!({
            "trust_domain": header.trust_domain, "node_id": header.node_id, "id": header.id, "kind": header.kind,
            "issued_at": header.issued_at, "not_after": header.not_after, "min_generation": body.min_generation,
            "args": args,
        });
        strictly(&parse(Format::Json, bytes).expect("it was taken"), &known);
        let again = Command::parse(known.to_string().into()).expect("a header");
        assert_eq!((&again.header, again.body(kind)), (header, Ok(body)));
        taken = true;
    }
    taken
}

fn cancel(bytes: &[u8]) -> bool {
    let Ok(body) = strict::parse::<CancelBody>(bytes) else { return false };
    let known = json!({
        "trust_domain": body.trust_domain, "node_id": body.node_id, "command_id": body.command_id,
        "issued_at": body.issued_at,
    });
    strictly(&parse(Format::Json, bytes).expect("it was taken"), &known);
    assert_eq!(strict::parse(known.to_string().as_bytes()), Ok(body));
    true
}

fn check(bytes: &[u8]) -> bool {
    command(bytes)
        | cancel(bytes)
        | taken::<TrustBundle>(bytes)
        | taken::<Revocation>(bytes)
        | taken::<JoinAnswer>(bytes)
        | taken::<RenewAnswer>(bytes)
        | taken::<RenewProof>(bytes)
        | taken::<RejoinProof>(bytes)
        | taken::<Leave>(bytes)
        | taken::<SignedResult>(bytes)
}

#[test]
fn a_signed_body_is_taken_only_with_known_keys_once_each_and_says_the_same_again() {
    Target { name: "bodies", format: Format::Json, check, memory: 64 << 10, per_byte: 320 }.run();
}

/// Calls `act` with the body after each change of one object within it, at any depth, and that object's place.
fn in_each_object(whole: &Body, change: fn(&mut Vec<Node>), act: &mut dyn FnMut(&[u8], &str)) {
    let mut places = Vec::new();
    find(whole, &mut Vec::new(), &mut places);
    for place in places {
        let mut copy = whole.clone();
        let (mut at, mut name) = (&mut copy, String::new());
        for step in &place {
            let node = &mut at.nodes_mut().expect("nodes")[*step];
            name = String::from_utf8_lossy(&node.head).trim_matches('"').to_owned();
            at = &mut node.body;
        }
        let Body::Nodes(nodes) = at else { continue };
        change(nodes);
        act(&print(Format::Json, &copy), &name);
    }
}

/// Where objects are.
fn find(body: &Body, place: &mut Vec<usize>, places: &mut Vec<Vec<usize>>) {
    if matches!(body, Body::Nodes(_)) {
        places.push(place.clone());
    }
    for (at, node) in body.nodes().iter().enumerate() {
        place.push(at);
        find(&node.body, place, places);
        place.pop();
    }
}

fn each_body() -> impl Iterator<Item = (String, Body)> {
    corpus("bodies").into_iter().filter(|(_, bytes)| check(bytes)).map(|(name, bytes)| {
        let body = parse(Format::Json, &bytes).expect("JSON");
        (name, body)
    })
}

#[test]
fn an_unknown_key_is_refused_wherever_it_stands() {
    let mut tried = 0;
    for (file, body) in each_body() {
        let stranger = |nodes: &mut Vec<Node>| {
            nodes.push(Node { head: b"\"stranger\"".to_vec(), body: Body::Leaf(b"1".to_vec()) });
        };
        in_each_object(&body, stranger, &mut |bytes, place| {
            tried += 1;
            assert!(!check(bytes), "{file}: {place:?} takes a stranger: {}", bytes.escape_ascii());
        });
    }
    assert!(tried > 15, "{tried}");
}

#[test]
fn a_doubled_key_is_refused_wherever_it_stands_and_however_it_is_written() {
    let mut tried = 0;
    for (file, body) in each_body() {
        let twice = |nodes: &mut Vec<Node>| nodes.extend(nodes.last().cloned());
        let escaped = |nodes: &mut Vec<Node>| {
            let Some(last) = nodes.last().cloned() else { return };
            let head = [format!("\"\\u00{:02x}", last.head[1]).as_bytes(), &last.head[2..]].concat();
            nodes.push(Node { head, ..last });
        };
        for change in [twice as fn(&mut Vec<Node>), escaped] {
            in_each_object(&body, change, &mut |bytes, place| {
                let unchanged = bytes == print(Format::Json, &body);
                tried += usize::from(!unchanged);
                assert!(unchanged || !check(bytes), "{file}: {place:?} doubles: {}", bytes.escape_ascii());
            });
        }
    }
    assert!(tried > 30, "{tried}");
}

#[test]
fn a_list_is_not_taken_for_an_object_wherever_it_stands() {
    for (file, body) in each_body() {
        let mut places = Vec::new();
        find(&body, &mut Vec::new(), &mut places);
        for place in places {
            let mut copy = body.clone();
            let at = place.iter().fold(&mut copy, |at, step| &mut at.nodes_mut().expect("nodes")[*step].body);
            let values = at.nodes().iter().map(|node| Node { head: Vec::new(), ..node.clone() }).collect();
            *at = Body::List(values);
            let bytes = print(Format::Json, &copy);
            assert!(!check(&bytes), "{file}: {}", bytes.escape_ascii());
        }
    }
}
