//! What processes read of one another's sockets and pipes, with any bytes, in pieces of any length,
//! and with other descriptors than they belong to: the result does not depend on the pieces.

use crate::Target;
use crate::input::Input;
use crate::scratch;
use jiffy_pager::testing::{self as pager, Opening};
use jiffy_sys::memfd::{self, Pages};
use jiffy_sys::sealed::Unsealed;
use jiffy_vmhost::testing as vmhost;
use jiffy_vmm::{config, testing as vmm};
use jiffy_wire::vmm::ControlResponse;
use std::fmt::Debug;
use std::fs::{self, File};

/// This target.
pub const TARGET: Target = Target {
    name: "process_streams",
    covers: &[
        "crates/pager/src/origins/client.rs",
        "crates/pager/src/origins/helpers.rs",
        "crates/pager/src/server/client.rs",
        "crates/pager/src/server/disk_peer.rs",
        "crates/pager/src/server/listen.rs",
        "crates/pager/src/server/served.rs",
        "crates/vmhost/src/capture.rs",
        "crates/vmhost/src/channels.rs",
        "crates/vmhost/src/control.rs",
        "crates/vmhost/src/pager/ask.rs",
        "crates/vmhost/src/process.rs",
        "crates/vmhost/src/task/end.rs",
        "crates/vmm/src/config.rs",
        "crates/vmm/src/control.rs",
        "crates/vmm/src/devices/disk_chunks.rs",
        "crates/vmm/src/pager.rs",
    ],
    seeds: all_seeds,
    run,
};

/// Most bytes of one input.
const MOST: usize = 60 << 10;

type Read = fn(&[u8], usize);

/// By the reader: what it reads, and the number of pieces' bytes or of descriptors.
const READS: &[(&str, Read)] = &[
    ("pager: control", |bytes, piece| {
        same(bytes, piece, pager::control_requests);
    }),
    ("pager: disk", |bytes, piece| {
        same(bytes, piece, pager::disk_requests);
    }),
    ("pager: handshake", |bytes, piece| {
        let (opening, _) = pager::handshake(bytes, piece + 1);
        if let Opening::Mappings(mappings) = opening {
            assert!(!mappings.is_empty() || bytes.contains(&b']'));
        }
    }),
    ("pager: written", |bytes, piece| {
        same(bytes, piece, pager::written);
    }),
    ("pager: origins", origins),
    ("origins: helper", |bytes, with| {
        let request = pager::helper_request(bytes, with % 2 == 1);
        assert!(with % 2 == 1 || request.is_none());
    }),
    ("node: events", |bytes, piece| {
        same(bytes, piece, vmhost::events);
    }),
    ("node: exit record", |bytes, _| {
        let folder = folder();
        vmhost::exit_record(bytes, &folder);
        fs::remove_dir_all(&folder).expect("the folder is removed");
    }),
    ("node: control", control),
    ("node: channel", |bytes, _| {
        let _ = vmhost::channel_answer(bytes);
    }),
    ("node: pager", |bytes, _| {
        let _ = vmhost::pager_answer(bytes);
    }),
    ("vmm: disk", |bytes, piece| {
        same(bytes, piece, |bytes, piece| {
            vmm::disk_answers(bytes, piece).ok()
        });
    }),
    ("vmm: working set", |bytes, with| {
        let file = memory(4096);
        let offered = vmm::working_set(bytes, (with % 2 == 1).then_some(&file));
        assert!(with % 2 == 1 || !matches!(offered, Ok(Some(_))));
    }),
    ("vmm: control", |bytes, piece| {
        same(bytes, piece, vmm::control_requests);
    }),
    ("vmm: configuration", |bytes, _| {
        let folder = folder();
        let file = folder.join("vmm.json");
        fs::write(&file, bytes).expect("the folder can be written");
        let _ = config::read(&file);
        fs::remove_dir_all(&folder).expect("the folder is removed");
    }),
];

fn run(data: &[u8]) {
    let mut input = Input(data);
    let (kind, number) = (usize::from(input.u8()), usize::from(input.u8()));
    let bytes = input.rest();
    if let Some((_, read)) = READS.get(kind) {
        read(&bytes[..bytes.len().min(MOST)], number);
    }
}

/// Reads bytes in pieces, and whole.
fn same<T: PartialEq + Debug>(bytes: &[u8], piece: usize, read: impl Fn(&[u8], usize) -> T) {
    assert_eq!(read(bytes, piece + 1), read(bytes, 4096));
}

/// An answer of `jiffy-origins` with memory that is missing, or has so many bytes, sealed or not.
fn origins(bytes: &[u8], number: usize) {
    let length = 1 + number / 4;
    let sealed = || {
        let memory = Unsealed::new("fuzz", length).expect("memory");
        memory.seal().expect("it is sealed")
    };
    let memory = match number % 4 {
        0 => None,
        1 => Some(memory(length as u64)),
        _ => Some(sealed()),
    };
    if let Ok(Ok(read)) = pager::answer(bytes, memory.as_ref(), length as u64) {
        assert!(number % 4 > 1 && read.len() == length);
    }
}

/// A VMM's answer, with so many descriptors.
fn control(bytes: &[u8], number: usize) {
    let files: Vec<File> = (0..number % 6).map(|_| memory(0)).collect();
    let Ok((answer, captured)) = vmhost::control_answer(bytes, &files) else {
        return;
    };
    if let Ok(layers) = captured {
        assert!(matches!(answer, ControlResponse::Captured { .. }));
        assert_eq!(layers + 2, files.len());
    }
}

fn memory(bytes: u64) -> File {
    memfd::create("fuzz", bytes, Pages::Small).expect("a memfd")
}

fn folder() -> std::path::PathBuf {
    let folder = scratch::folder().join("streams");
    fs::create_dir_all(&folder).expect("a folder");
    folder
}

fn all_seeds() -> Vec<Vec<u8>> {
    let mapping = br#"{"on_behalf_of":7}
[{"base_host_virt_addr":139637976727552,"size":134217728,"offset":0,"page_size":4096,"page_size_kib":4096}]"#;
    let config = include_str!("../../../crates/wire/golden/vmm-1.txt");
    let config = config
        .lines()
        .find_map(|line| line.strip_prefix("VmmConfig "));
    let requests = b"\"ping\"\n{\"stats\":{\"name\":\"a\"}}\n";
    let chunk = b"{\"on_behalf_of\":7}\n{\"id\":1,\"offset\":0,\"length\":512}\n";
    let chunks = [&b"{\"bytes\":{\"id\":1,\"length\":512}}\n"[..], &[7; 512]].concat();
    let captured = br#"{"captured":{"layers":2,"pause_ns":5,"copied_bytes":6}}"#;
    vec![
        of("pager: control", 9, requests),
        of("pager: disk", 20, chunk),
        of("pager: handshake", 30, mapping),
        of(
            "pager: handshake",
            3,
            jiffy_wire::pager::WORKING_SET_QUESTION,
        ),
        of("pager: written", 5, b"{\"written\":[[0,4096]]}\n"),
        of("pager: origins", 14, b"{\"bytes\":{\"offset\":0}}\n"),
        of(
            "pager: origins",
            0,
            b"{\"failed\":{\"why\":\"no\",\"again\":true}}\n",
        ),
        of(
            "origins: helper",
            1,
            br#"{"name":"pass","registry":"localhost:5000"}"#,
        ),
        of(
            "node: events",
            11,
            b"{\"mark\":{\"value\":3,\"at_ns\":4}}\n{\"",
        ),
        of(
            "node: exit record",
            0,
            br#"{"reason":"stopped","message":"Stopped.","hint":null}"#,
        ),
        of("node: control", 4, &line(captured)),
        of("node: channel", 0, b"\"ok\"\n"),
        of("node: pager", 0, b"\"ok\"\n"),
        of("vmm: disk", 99, &chunks),
        of(
            "vmm: working set",
            1,
            b"{\"working_set\":{\"ranges\":[[0,4096]],\"written\":null}}\n",
        ),
        of(
            "vmm: control",
            3,
            b"\"stats\"\n{\"capture\":{\"resume\":true}}\n",
        ),
        of(
            "vmm: configuration",
            0,
            config.unwrap_or_default().as_bytes(),
        ),
    ]
}

fn line(message: &[u8]) -> Vec<u8> {
    [message, b"\n"].concat()
}

fn of(reader: &str, number: u8, bytes: &[u8]) -> Vec<u8> {
    let kind = READS.iter().position(|(known, _)| *known == reader);
    let kind = kind.expect("a known reader") as u8;
    [&[kind, number], bytes].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seeds that nothing accepts would reach little.
    #[test]
    fn seeds_are_accepted() {
        let rest = |reader: &str| {
            let seeds = all_seeds().into_iter();
            let kind = READS.iter().position(|(known, _)| *known == reader);
            let mut seeds = seeds.filter(|seed| Some(usize::from(seed[0])) == kind);
            seeds.next().expect("a seed")[2..].to_vec()
        };
        assert_eq!(pager::control_requests(&rest("pager: control"), 9).len(), 2);
        let (requests, pid) = pager::disk_requests(&rest("pager: disk"), 20);
        assert_eq!((requests.len(), pid), (1, Some(7)));
        let (opening, pid) = pager::handshake(&rest("pager: handshake"), 30);
        assert!(matches!(opening, Opening::Mappings(mappings) if mappings.len() == 1));
        assert_eq!(pid, Some(7));
        let ranges = pager::written(&rest("pager: written"), 5);
        assert_eq!(ranges.map(|ranges| ranges.len()), Some(1));
        let sealed = Unsealed::new("fuzz", 4).and_then(Unsealed::seal).unwrap();
        let answer = pager::answer(&rest("pager: origins"), Some(&sealed), 4);
        assert_eq!(*answer.unwrap().unwrap(), [0; 4]);
        assert!(pager::helper_request(&rest("origins: helper"), true).is_some());
        assert_eq!(vmhost::events(&rest("node: events"), 11).len(), 1);
        let folder = tempfile::tempdir().unwrap();
        let record = vmhost::exit_record(&rest("node: exit record"), folder.path());
        assert!(record.is_some());
        let files: Vec<File> = (0..4).map(|_| memory(0)).collect();
        let (_, layers) = vmhost::control_answer(&rest("node: control"), &files).unwrap();
        assert_eq!(layers, Ok(2));
        vmhost::channel_answer(&rest("node: channel")).unwrap();
        vmhost::pager_answer(&rest("node: pager")).unwrap();
        let answers = vmm::disk_answers(&rest("vmm: disk"), 99).unwrap();
        assert_eq!(answers[0].1, [7; 512]);
        let offered = vmm::working_set(&rest("vmm: working set"), Some(&memory(0)));
        assert!(offered.unwrap().is_some());
        assert_eq!(vmm::control_requests(&rest("vmm: control"), 3).len(), 2);
        let path = folder.path().join("vmm.json");
        fs::write(&path, rest("vmm: configuration")).unwrap();
        config::read(&path).unwrap();
    }
}
