//! `jiffy-pager replay`.

use super::support::*;
use jiffy_store::{ImageReader, Recording};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn replay(recording: &Path, image: &Path, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_jiffy-pager"))
        .arg("replay")
        .arg(recording)
        .arg("--image")
        .arg(image)
        .args(["--repeat", "1"])
        .args(more)
        .output()
        .unwrap()
}

fn record(folder: &Path, image: &Path, chunks: Vec<u32>) -> std::path::PathBuf {
    let reader = ImageReader::open(image).unwrap();
    let path = folder.join("touched");
    let recording = Recording {
        image: reader.id(),
        chunk_size: reader.chunk_size(),
        chunks,
    };
    recording.write(&path).unwrap();
    path
}

#[test]
fn every_strategy_replays_the_whole_recording() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), 4 * MIB, |_| {});
    // Includes the last chunk.
    let chunks: Vec<u32> = (100..130).chain([511, 3, 9, 200]).collect();
    let count = chunks.len() as u64;
    let recording = record(folder.path(), &image, chunks);
    let output = replay(&recording, &image, &["--format", "json"]);
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["chunks"], count);
    assert_eq!(report["bytes"], count * 8192);
    let strategies = report["strategies"].as_array().unwrap();
    let named = |name: &str| {
        strategies
            .iter()
            .find(|line| line["name"] == name)
            .unwrap_or_else(|| panic!("{name} is missing"))
    };
    for line in strategies {
        let name = &line["name"];
        let number = |field: &str| line[field].as_u64().unwrap();
        assert_eq!(number("count"), count, "{name}");
        assert!(number("min_ns") <= number("p50_ns"), "{name}");
        assert!(number("p50_ns") <= number("p99_ns"), "{name}");
        assert!(number("p99_ns") <= number("max_ns"), "{name}");
        assert!(number("max_ns") <= number("total_ns"), "{name}");
        assert!(number("file_bytes") > 0 && line["mib_per_s"].as_f64().unwrap() > 0.0);
    }
    for kind in ["read", "fault"] {
        // One request for each page or chunk, fewer with larger chunks or prefetch.
        let requests = |what: &str| {
            named(&format!("{kind}/{what}"))["requests"]
                .as_u64()
                .unwrap()
        };
        assert_eq!(requests("sparse/4K"), count * 2);
        assert_eq!(requests("lz4/8K"), count);
        assert!(requests("lz4/64K") < count);
        // With faults, prefetch may lose the race on a slow host.
        match kind {
            "read" => assert!(requests("lz4/8K/prefetch") < count),
            _ => assert!(requests("lz4/8K/prefetch") <= count),
        }
        let sparse = named(&format!("{kind}/sparse/4K"))["times_sparse"].is_null();
        assert!(sparse && named(&format!("{kind}/lz4/8K"))["times_sparse"].is_number());
    }
    let smaller = named("read/lz4/8K")["file_bytes"].as_u64().unwrap();
    assert!(smaller < named("read/compact/8K")["file_bytes"].as_u64().unwrap());
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        2,
        "image and recording"
    );
}

#[test]
fn selected_strategies_are_printed_as_a_table() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), MIB, |_| {});
    let recording = record(folder.path(), &image, vec![1, 2, 5]);
    let output = replay(&recording, &image, &["--cold", "--only", "read/lz4/8K"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("3 chunks of 8 KiB"), "{text}");
    assert!(
        text.contains("read/lz4/8K/prefetch") && !text.contains("fault/"),
        "{text}"
    );
}

#[test]
fn an_unusable_recording_or_image_is_refused_with_a_message() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), MIB, |_| {});
    let recording = record(folder.path(), &path, vec![1]);
    let refused = |recording: &Path, image: &Path| {
        let output = replay(recording, image, &[]);
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let elsewhere = tempfile::tempdir().unwrap();
    let other = image(elsewhere.path(), 2 * MIB, |_| {});
    assert!(refused(&recording, &other).contains("is of the image with the id"));
    assert!(refused(&path, &path).contains("not a recording"));
    assert!(refused(&recording, &folder.path().join("none")).contains("none"));
    let beyond = record(folder.path(), &path, vec![1, 128]);
    assert!(refused(&beyond, &path).contains("beyond the end"));
    let empty = record(folder.path(), &path, vec![]);
    assert!(refused(&empty, &path).contains("no chunks"));
}

/// A worker that is told to end while it prefetches, when faults are slow.
#[test]
fn workers_stop_while_they_are_busy() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), 8 * MIB, |_| {});
    let recording = record(folder.path(), &image, (100..220).collect());
    let ended = Command::new("timeout")
        .arg("300")
        .arg(env!("CARGO_BIN_EXE_jiffy-pager"))
        .arg("replay")
        .arg(recording)
        .arg("--image")
        .arg(image)
        .args(["--only", "fault/lz4/8K", "--cold", "--repeat", "40"])
        .output()
        .unwrap();
    assert!(ended.status.success(), "{ended:?}");
}
