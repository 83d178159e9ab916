//! JSON and frames that processes send one another and that clients send the daemon:
//! every decoded message can be encoded, and decodes to the same message.

use crate::Target;
use crate::input::Input;
use jiffy_pager::origins::request::HelperRequest;
use jiffy_wire::{agent, api, disk, frame, guest, import, pager, text::list::List, timeline, vmm};
use serde::{Serialize, de::DeserializeOwned};
use std::fmt::Debug;

/// This target.
pub const TARGET: Target = Target {
    name: "process_messages",
    covers: &[
        "crates/machine/src/protocol.rs",
        "crates/wire/src/import.rs",
        "crates/wire/src/mac.rs",
        "crates/wire/src/vmm",
    ],
    seeds: all_seeds,
    run,
};

type Check = fn(&[u8]);

/// By name, as the transcripts of releases have them.
const CHECKS: &[(&str, Check)] = &[
    ("VmmConfig", json::<vmm::VmmConfig>),
    ("VmmEvent", json::<vmm::VmmEvent>),
    ("ExitRecord", json::<vmm::ExitRecord>),
    ("ControlRequest", json::<vmm::ControlRequest>),
    ("ControlResponse", json::<vmm::ControlResponse>),
    ("TakeSpare", json::<vmm::TakeSpare>),
    ("MemoryLayout", json::<vmm::MemoryLayout>),
    ("PagerRequest", json::<pager::PagerRequest>),
    ("PagerResponse", json::<pager::PagerResponse>),
    ("VmmMessage", json::<pager::VmmMessage>),
    ("PagerMessage", json::<pager::PagerMessage>),
    ("ChunkRequest", json::<disk::ChunkRequest>),
    ("ChunkAnswer", json::<disk::ChunkAnswer>),
    ("GuestConfig", json::<guest::GuestConfig>),
    ("Generation", json::<guest::Generation>),
    ("Vm", json::<api::Vm>),
    ("Timeline", json::<timeline::Timeline>),
    ("List", list_of),
    ("Hello", framed::<jiffy_machine::protocol::Hello>),
    ("Request", framed::<jiffy_machine::protocol::Request>),
    ("Ready", json::<jiffy_machine::protocol::Ready>),
    ("LogChunk", framed::<api::LogChunk>),
    ("ExecOutput", framed::<agent::ExecOutput>),
    ("Event", json::<api::Event>),
    ("HelperRequest", json::<HelperRequest>),
    ("ImportAnswer", import_answer),
    ("OnBehalf", json::<pager::OnBehalf>),
];

fn run(data: &[u8]) {
    let mut input = Input(data);
    let kind = usize::from(input.u8());
    if let Some((_, check)) = CHECKS.get(kind) {
        check(input.rest());
    }
}

fn import_answer(bytes: &[u8]) {
    let _ = import::decode_request(bytes);
    let Ok(answer) = import::decode_answer(bytes) else {
        return;
    };
    let written = import::encode(&answer).expect("a message is written");
    let (head, body) = written.split_first_chunk().expect("it has a length");
    assert_eq!(import::length(*head), Ok(body.len()));
    assert_eq!(import::decode_answer(body), Ok(answer));
}

fn json<T: Serialize + DeserializeOwned + Debug>(text: &[u8]) {
    let Ok(message) = serde_json::from_slice::<T>(text) else {
        return;
    };
    let written = serde_json::to_vec(&message).expect("a message is written");
    let again: T = serde_json::from_slice(&written).expect("what was written is read");
    assert_eq!(format!("{again:?}"), format!("{message:?}"));
}

fn framed<T: Serialize + DeserializeOwned + Debug>(bytes: &[u8]) {
    let mut decoder = frame::Decoder::new();
    decoder.push(bytes);
    while let Ok(Some(message)) = decoder.next::<T>() {
        let written = frame::to_vec(&message).expect("a message fits a frame");
        let mut again = frame::Decoder::new();
        again.push(&written);
        let again: T = again
            .next()
            .expect("what was written is read")
            .expect("whole");
        assert_eq!(format!("{again:?}"), format!("{message:?}"));
    }
}

/// A VM is one line of a list, whatever its name and its image are.
fn list_of(json: &[u8]) {
    if let Ok(vm) = serde_json::from_slice::<api::Vm>(json) {
        let list = List::of(&[vm], 1_800_000_000).text();
        assert_eq!(list.lines().count(), 2);
        assert!(list.chars().all(|c| c == '\n' || !c.is_control()));
    }
}

fn all_seeds() -> Vec<Vec<u8>> {
    let transcripts = [
        include_str!("../../../crates/wire/golden/vmm-1.txt"),
        include_str!("../../../crates/wire/golden/pager-1.txt"),
        include_str!("../../../crates/wire/golden/guest-1.txt"),
        include_str!("../../../crates/wire/golden/api-1.txt"),
    ];
    let mut seeds = Vec::new();
    for line in transcripts.iter().flat_map(|text| text.lines()) {
        if let Some((name, message)) = line.split_once(' ')
            && CHECKS.iter().any(|(known, _)| *known == name)
            && message.starts_with(['{', '[', '"'])
        {
            seeds.push(of(name, message.as_bytes()));
            if name == "Vm" {
                seeds.push(of("List", message.as_bytes()));
            }
        }
    }
    let hello = jiffy_machine::protocol::Hello {
        version: 1,
        token: "t".into(),
    };
    let hello = frame::to_vec(&hello).expect("it fits");
    let started = frame::to_vec(&agent::ExecOutput::Started { pid: 7 }).expect("it fits");
    seeds.push(of("Hello", &hello));
    seeds.push(of("OnBehalf", br#"{"on_behalf_of":7}"#));
    seeds.push(of("ExecOutput", &started));
    seeds.push(of(
        "Event",
        br#"{"time_ms":1,"subject":"vm","action":"exited","name":"web","exit":{"code":0}}"#,
    ));
    seeds.push(of(
        "HelperRequest",
        br#"{"name":"pass","registry":"localhost:5000"}"#,
    ));
    seeds.push(of(
        "MemoryLayout",
        br#"{"size":8192,"covers":[[[0,4096]]]}"#,
    ));
    let answers = [
        import::Answer::Progress { done: 1, total: 2 },
        import::Answer::Made(import::Made {
            config: import::Config {
                cmd: vec!["sh".into()],
                labels: vec![("a".into(), "b".into())],
                ..import::Config::default()
            },
            ..import::Made::default()
        }),
        import::Answer::Failed(import::Failure {
            kind: import::FailureKind::Full,
            sentence: "no".into(),
        }),
    ];
    for answer in answers {
        let bytes = import::encode(&answer).expect("it fits");
        seeds.push(of("ImportAnswer", &bytes[4..]));
    }
    seeds
}

fn of(name: &str, message: &[u8]) -> Vec<u8> {
    let kind = CHECKS.iter().position(|(known, _)| *known == name);
    [&[kind.expect("a known message") as u8], message].concat()
}
