//! A stand-in for `jiffy-pager` that serves no memory: it listens where requested, and counts
//! requests.

use jiffy_wire::disk::{CONTENTS, PRESENT};
use jiffy_wire::lines;
use jiffy_wire::pager::{PagerRequest, PagerResponse, PagerStats};
use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

struct Served {
    socket: PathBuf,
    connections: Arc<Mutex<u64>>,
}

type All = Arc<Mutex<HashMap<String, Served>>>;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ["serve", "--control", control, ..] = words[1..] else {
        eprintln!("fake-pager: serve --control SOCKET …");
        std::process::exit(2);
    };
    let listener = UnixListener::bind(control).unwrap();
    let all = All::default();
    for stream in listener.incoming() {
        let (stream, all) = (stream.unwrap(), Arc::clone(&all));
        thread::spawn(move || answer(stream, &all));
    }
}

fn answer(stream: UnixStream, all: &All) {
    let mut output = stream.try_clone().unwrap();
    for line in BufReader::new(stream).lines() {
        let request: PagerRequest = serde_json::from_str(&line.unwrap()).unwrap();
        let answer = lines::encode(&perform(request, all)).unwrap();
        if output.write_all(&answer).is_err() {
            return;
        }
    }
}

/// While a test has made this file; tells it by the other file.
fn wait_while(file: &str, told: &str) {
    if Path::new(file).exists() {
        fs::write(told, b"").unwrap();
    }
    while Path::new(file).exists() {
        thread::sleep(Duration::from_millis(5));
    }
}

fn perform(request: PagerRequest, all: &All) -> PagerResponse {
    // The place at which a test wants a late pager.
    if matches!(request, PagerRequest::Stats { .. }) && Path::new("late").exists() {
        thread::sleep(Duration::from_millis(300));
    }
    // A slow one at the end of a service, or at its beginning.
    match request {
        PagerRequest::Forget { .. } => wait_while("slow", "forgetting"),
        PagerRequest::Serve { .. } => wait_while("slow-begin", "beginning"),
        _ => {}
    }
    let mut all = all.lock().unwrap();
    match request {
        PagerRequest::Ping => PagerResponse::Ok,
        PagerRequest::Serve {
            name,
            socket,
            image,
            record,
            ..
        } => {
            if !image.exists() {
                return PagerResponse::Error(format!("{} is not there.", image.display()));
            }
            if let Some(record) = record {
                fs::write(record, "no recording").unwrap();
            }
            let listener = UnixListener::bind(&socket).unwrap();
            let connections = Arc::<Mutex<u64>>::default();
            let count = Arc::clone(&connections);
            thread::spawn(move || {
                for stream in listener.incoming() {
                    std::mem::forget(stream.unwrap());
                    *count.lock().unwrap() += 1;
                }
            });
            let served = Served {
                socket,
                connections,
            };
            let before = all.insert(name, served);
            assert!(before.is_none(), "a VM is served twice");
            PagerResponse::Ok
        }
        PagerRequest::OpenDisk(disk) => {
            if !disk.image.exists() {
                return PagerResponse::Error(format!("{} is not there.", disk.image.display()));
            }
            fs::create_dir_all(&disk.cache).unwrap();
            for file in [CONTENTS, PRESENT] {
                fs::write(disk.cache.join(file), b"").unwrap();
            }
            let disk_socket = disk.socket.clone();
            let served = Served {
                socket: disk.socket,
                connections: Arc::default(),
            };
            // A daemon that lost its state sends the request again.
            if let Some(open) = all.insert(disk.name, served) {
                assert_eq!(
                    open.socket, disk_socket,
                    "a disk is opened twice, otherwise"
                );
            }
            PagerResponse::Ok
        }
        PagerRequest::Origins { image, .. } => {
            // For tests to read.
            fs::write(image.with_extension("told"), b"").unwrap();
            PagerResponse::Ok
        }
        PagerRequest::EndRecording { .. } | PagerRequest::CompleteImage { .. } => PagerResponse::Ok,
        PagerRequest::Complete { name } => match all.contains_key(&name) {
            true => PagerResponse::Ok,
            false => PagerResponse::Error(format!("There is no VM {name}.")),
        },
        PagerRequest::Forget { name } => match all.remove(&name) {
            Some(served) => {
                let _ = fs::remove_file(served.socket);
                PagerResponse::Ok
            }
            None => PagerResponse::Error(format!("There is no VM {name}.")),
        },
        PagerRequest::Stats { name } => match all.get(&name) {
            Some(served) => PagerResponse::Stats(PagerStats {
                faults: *served.connections.lock().unwrap(),
                fault_ns: 1000,
                first_fault_ns: jiffy_sys::clock::monotonic_ns(),
                ..PagerStats::default()
            }),
            None => PagerResponse::Error(format!("There is no VM {name}.")),
        },
    }
}
