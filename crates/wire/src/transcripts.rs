//! Compares today's messages with those of release 0.1, byte for byte.
//!
//! `golden/NAME-VERSION.txt` has one message per line: its type, then the message. A message in a
//! frame is hexadecimal, followed by its meaning.
//!
//! If one of these tests fails, processes of another release don't understand today's messages: an
//! older VMM, guest, pager or command line with a newer daemon. docs/upgrades.md describes which
//! changes are allowed.

use crate::{agent, api, disk, frame, guest, pager, timeline, vmm};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::fmt::Debug;

/// Type and message of each line.
fn lines(text: &'static str) -> Vec<(&'static str, &'static str)> {
    let parts = text.lines().map(|line| line.split_once(' ').unwrap());
    parts.collect()
}

/// Checks that a frame decodes to its meaning and encodes to the same bytes.
fn framed<T: Serialize + DeserializeOwned + Debug>(line: &str) {
    let (bytes, meaning) = line.split_once(' ').unwrap();
    let byte = |at| u8::from_str_radix(&bytes[at..at + 2], 16).unwrap();
    let bytes: Vec<u8> = (0..bytes.len()).step_by(2).map(byte).collect();
    let mut decoder = frame::Decoder::new();
    decoder.push(&bytes);
    let message: T = decoder.next().unwrap().unwrap();
    assert_eq!(format!("{message:?}"), meaning);
    assert_eq!(frame::to_vec(&message).unwrap(), bytes, "{meaning}");
}

/// For JSON to an older peer that refuses unknown fields: it must parse and be written unchanged.
/// New fields must therefore be omitted when they are not used.
fn same<T: Serialize + DeserializeOwned>(line: &str) {
    let message: T = serde_json::from_str(line).unwrap();
    assert_eq!(serde_json::to_string(&message).unwrap(), line);
}

/// For JSON to an older peer that ignores unknown fields: it must parse, and all its fields must
/// still be written.
fn more<T: Serialize + DeserializeOwned>(line: &str) {
    let message: T = serde_json::from_str(line).unwrap();
    let today = serde_json::to_value(&message).unwrap();
    has_all(&today, &serde_json::from_str(line).unwrap(), line);
}

fn has_all(today: &Value, then: &Value, line: &str) {
    match (today, then) {
        (Value::Object(today), Value::Object(then)) => {
            for (key, then) in then {
                let today = today.get(key).unwrap_or_else(|| panic!("{key} in {line}"));
                has_all(today, then, line);
            }
        }
        (Value::Array(today), Value::Array(then)) => {
            assert_eq!(today.len(), then.len(), "{line}");
            for (today, then) in today.iter().zip(then) {
                has_all(today, then, line);
            }
        }
        _ => assert_eq!(today, then, "{line}"),
    }
}

#[test]
fn messages_of_0_1_guests_round_trip() {
    let first = lines(include_str!("../golden/agent-1.txt"));
    let second = lines(include_str!("../golden/agent-2.txt"));
    for (kind, line) in first.into_iter().chain(second) {
        match kind {
            "FromGuest" => framed::<agent::FromGuest>(line),
            "ToGuest" => framed::<agent::ToGuest>(line),
            "Request" => framed::<agent::Request>(line),
            "ExecInput" => framed::<agent::ExecInput>(line),
            "ExecOutput" => framed::<agent::ExecOutput>(line),
            "CopyFrame" => framed::<agent::CopyFrame>(line),
            "CopyDone" => framed::<agent::CopyDone>(line),
            "Done" => framed::<agent::Done>(line),
            "Stat" => framed::<agent::Stat>(line),
            "LogChunk" => framed::<api::LogChunk>(line),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn fw_cfg_files_of_0_1_guests_round_trip() {
    for (kind, line) in lines(include_str!("../golden/guest-1.txt")) {
        match kind {
            "GuestConfig" => same::<guest::GuestConfig>(line),
            "Generation" => same::<guest::Generation>(line),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn messages_of_0_1_vmms_round_trip() {
    for (kind, line) in lines(include_str!("../golden/vmm-1.txt")) {
        match kind {
            "VmmConfig" => same::<vmm::VmmConfig>(line),
            "TakeSpare" => same::<vmm::TakeSpare>(line),
            "MemoryLayout" => same::<vmm::MemoryLayout>(line),
            "ControlRequest" => same::<vmm::ControlRequest>(line),
            "ControlResponse" => more::<vmm::ControlResponse>(line),
            "VmmEvent" => more::<vmm::VmmEvent>(line),
            "ExitRecord" => more::<vmm::ExitRecord>(line),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn messages_of_0_1_pagers_round_trip() {
    for (kind, line) in lines(include_str!("../golden/pager-1.txt")) {
        match kind {
            "Mappings" => same::<Vec<pager::Mapping>>(line),
            "Question" => assert_eq!(
                pager::WORKING_SET_QUESTION.strip_suffix(b"\n").unwrap(),
                line.as_bytes()
            ),
            "VmmMessage" => same::<pager::VmmMessage>(line),
            "PagerMessage" => same::<pager::PagerMessage>(line),
            "PagerRequest" => same::<pager::PagerRequest>(line),
            "PagerResponse" => more::<pager::PagerResponse>(line),
            "ChunkRequest" => same::<disk::ChunkRequest>(line),
            "ChunkAnswer" => same::<disk::ChunkAnswer>(line),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn messages_of_a_0_1_command_line_round_trip() {
    for (kind, line) in lines(include_str!("../golden/api-1.txt")) {
        match kind {
            // A daemon of release 0.1 refuses unknown fields in these.
            "CreateVm" => same::<api::CreateVm>(line),
            "RunVm" => same::<api::RunVm>(line),
            "ForkVm" => same::<api::ForkVm>(line),
            "MakeSnapshot" => same::<api::MakeSnapshot>(line),
            "PullImage" => same::<api::PullImage>(line),
            "PushArtifact" => same::<api::PushArtifact>(line),
            "CommitVm" => same::<api::CommitVm>(line),
            "MakeVolume" => same::<api::MakeVolume>(line),
            "ResizeVolume" => same::<api::ResizeVolume>(line),
            "Command" => same::<agent::Command>(line),
            // A command line of release 0.1 reads these.
            "VmState" => more::<api::VmState>(line),
            "Vm" => more::<api::Vm>(line),
            "Timeline" => more::<timeline::Timeline>(line),
            "Forked" => more::<api::Forked>(line),
            "Hibernated" => more::<api::Hibernated>(line),
            "SnapshotMade" => more::<api::SnapshotMade>(line),
            "MemoryReport" => more::<api::MemoryReport>(line),
            "Pruned" => more::<api::Pruned>(line),
            "NodeInfo" => more::<api::NodeInfo>(line),
            "PullStep" => more::<api::PullStep>(line),
            "Committed" => more::<api::Committed>(line),
            "KernelInfo" => more::<api::KernelInfo>(line),
            "ResizedVolume" => more::<api::ResizedVolume>(line),
            "ApiError" => more::<api::ApiError>(line),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn the_newest_common_version_is_spoken() {
    assert_eq!(agent::negotiated_version(0), None);
    for version in agent::OLDEST..=agent::VERSION {
        assert_eq!(agent::negotiated_version(version), Some(version));
        assert!(agent::is_supported(version));
    }
    for newer in [agent::VERSION + 1, u16::MAX] {
        assert_eq!(agent::negotiated_version(newer), Some(agent::VERSION));
        assert!(!agent::is_supported(newer));
    }
    assert!(!agent::is_supported(0));
    // VMs of the previous release keep running under this one.
    assert_eq!(agent::OLDEST, 1);
}
