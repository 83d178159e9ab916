//! The name server's messages: a guest's question, answered from the directory of VMs, and a
//! resolver's arbitrary answer.

use crate::Target;
use crate::input::Input;
use jiffy_net::names::directory::{Asker, Directory, Known};
use jiffy_net::names::message::{self, Rejected, UDP_BYTES};
use jiffy_net::policy::Policy;
use jiffy_net::{VmId, policy};
use std::net::Ipv4Addr;
use std::time::Duration;

/// This target.
pub const TARGET: Target = Target {
    name: "name_messages",
    covers: &["crates/net/src/names"],
    seeds: all_seeds,
    run,
};

/// Number of the question that a resolver is asked.
const ID: u16 = 1;

fn run(data: &[u8]) {
    let mut input = Input(data);
    let length = usize::from(input.u16());
    let (question, answer) = (input.bytes(length), input.rest());
    let question = match message::read(question) {
        Ok(question) => question,
        Err(Rejected::Silence) => return,
        Err(Rejected::Answer(error)) => {
            assert!(error[2] & 0x80 != 0, "an answer has the response flag");
            return;
        }
    };
    assert!(!question.name.bytes().any(|it| it.is_ascii_uppercase()));
    let (directory, web) = directory();
    let known = directory.look_up(&web, &question.name);
    if let Some(own) = question.own(&known) {
        assert_ne!(known, Known::Nothing);
        assert!(own.len() <= 512 + question.name.len());
    }
    let _ = (
        web.policy.resolves(&question.name),
        !web.policy.opened_at(&question.name).is_empty(),
    );
    let Some(resolved) = message::read_answer(&question, ID, answer) else {
        return;
    };
    for (address, _) in &resolved.addresses {
        let _ = policy::opened_by_name(*address);
    }
    for most in [512, usize::from(UDP_BYTES), usize::from(u16::MAX)] {
        if let Some(told) = question.relay(&resolved, Duration::from_secs(7), most) {
            assert!(told.len() <= most, "{} of {most} bytes", told.len());
        }
    }
}

fn directory() -> (Directory, Asker) {
    let directory = Directory::new(Ipv4Addr::new(10, 118, 0, 1), None);
    let rules = |text: &str| vec![text.parse().expect("a rule")];
    let web = Asker {
        vm: VmId::parse("000000000002").expect("an id"),
        name: "web".to_owned(),
        network: Some("blue".to_owned()),
        policy: Policy {
            allow: rules("*.example"),
            deny: rules("all"),
        },
        v4: Ipv4Addr::new(10, 118, 0, 2),
        v6: None,
    };
    directory.set(web.clone());
    (directory, web)
}

/// A question, in the bytes of RFC 1035 §4.1.
fn question(name: &str, kind: u8) -> Vec<u8> {
    let mut bytes = vec![0, ID as u8, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        bytes.push(label.len() as u8);
        bytes.extend_from_slice(label.as_bytes());
    }
    bytes.extend_from_slice(&[0, 0, kind, 0, 1]);
    bytes
}

/// An answer to it with these records; each begins with the question's name.
fn answer(question: &[u8], records: &[&[u8]]) -> Vec<u8> {
    let mut bytes = question.to_vec();
    bytes[2] |= 0x80;
    bytes[7] = records.len() as u8;
    for record in records {
        bytes.extend_from_slice(&[0xc0, 12]);
        bytes.extend_from_slice(record);
    }
    bytes
}

fn all_seeds() -> Vec<Vec<u8>> {
    const A: &[u8] = &[0, 1, 0, 1, 0, 0, 0, 100, 0, 4, 203, 0, 113, 9];
    // A name that leads to itself.
    const CNAME: &[u8] = &[0, 5, 0, 1, 0, 0, 0, 100, 0, 2, 0xc0, 12];
    const TEXT: &[u8] = &[0, 16, 0, 1, 0, 0, 0, 100, 0, 3, 2, b'h', b'i'];
    const UNKNOWN: &[u8] = &[0xff, 1, 0, 1, 0, 0, 0, 100, 0, 3, 1, 2, 3];
    let pair = |question: Vec<u8>, answer: Vec<u8>| {
        let length = (question.len() as u16).to_le_bytes();
        [&length[..], &question, &answer].concat()
    };
    let asked = |name, kind, records: &[&[u8]]| {
        let question = question(name, kind);
        let answer = answer(&question, records);
        pair(question, answer)
    };
    vec![
        asked("a.example", 1, &[CNAME, A, A]),
        asked("a.example", 16, &[TEXT, UNKNOWN]),
        asked("web", 1, &[]),
        asked("WEB.jiffy.internal", 28, &[]),
        asked("2.0.118.10.in-addr.arpa", 12, &[]),
        pair(question("x", 255), Vec::new()),
    ]
}
