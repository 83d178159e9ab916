//! A shared folder whose driver does anything, on any of its queues, and whose server answers with
//! anything.

use crate::Target;
use crate::queue::{CONTENTS, Script};
use jiffy_devices::virtio::device::VirtioDevice;
use jiffy_devices::virtio::fs::{Fs, FsArgs};
use jiffy_wire::files::MESSAGE_MAX;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};
use std::os::fd::OwnedFd;
use std::thread;

/// The queue for requests, not the one for urgent ones.
const REQUESTS: u8 = 1;
const EVENT_IDX: u8 = 2;
/// There is no server.
const ALONE: u8 = 4;
/// The server sends other things before each answer.
const NOISY: u8 = 8;

const FEATURE_EVENT_IDX: u64 = 1 << 29;
const ANSWER: u64 = 0x20000;

/// This target.
pub const TARGET: Target = Target {
    name: "fs_queues",
    covers: &[
        "crates/devices/src/virtio/fs",
        "crates/devices/src/virtio/queue",
    ],
    seeds: all_seeds,
    run,
};

fn run(data: &[u8]) {
    let script = Script::read(data);
    let has = |switch: u8| script.switches & switch != 0;
    let flags = SocketFlags::CLOEXEC;
    let (device, server) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("sockets");
    let noise = has(NOISY).then(|| script.contents.clone());
    let server = (!has(ALONE)).then(|| thread::spawn(move || serve(&server, noise.as_deref())));
    let args = |server| FsArgs {
        tag: "folder0".into(),
        server,
        message_max: MESSAGE_MAX,
    };
    let fs = Fs::new(args(server.as_ref().map(|_| device))).expect("a device");
    let mut features = fs.features();
    if !has(EVENT_IDX) {
        features &= !FEATURE_EVENT_IDX;
    }
    let queue = u16::from(has(REQUESTS));
    let fs = script.play_on(fs, &[64, 64], queue, features, has(EVENT_IDX), |_| {});
    Fs::restore(args(None), &fs.save()).expect("what was saved is restored");
    drop(fs);
    if let Some(server) = server {
        server.join().expect("the guest's messages are well-formed");
    }
}

/// Checks what a server may rely on, and answers.
fn serve(socket: &OwnedFd, noise: Option<&[u8]>) {
    let mut message = vec![0; 2 * MESSAGE_MAX];
    let mut answered = 0;
    while let Ok((_, length @ 1..)) = recv(socket, &mut message[..], RecvFlags::empty()) {
        assert!((40..=MESSAGE_MAX).contains(&length));
        assert_eq!(message[..4], (length as u32).to_le_bytes());
        let opcode = u32::from_le_bytes(message[4..8].try_into().expect("four bytes"));
        assert_ne!(opcode, 36, "an INTERRUPT names an id that is unknown here");
        let mut answer = [0; 24];
        answer[0] = 24;
        answer[8..16].copy_from_slice(&message[8..16]);
        if let Some(noise) = noise {
            let part = noise.get(answered..).unwrap_or_default();
            let _ = send(socket, &part[..part.len().min(64)], SendFlags::NOSIGNAL);
            answered += 1;
        }
        if !matches!(opcode, 2 | 42) && send(socket, &answer, SendFlags::NOSIGNAL).is_err() {
            return;
        }
    }
}

/// Requests of all kinds.
fn all_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for opcode in [1, 2, 3, 16, 26, 36, 42] {
        let mut request = vec![0; 56];
        request[0] = 56;
        request[4] = opcode;
        request[8] = 7;
        for switches in [
            0,
            REQUESTS,
            REQUESTS | EVENT_IDX,
            REQUESTS | ALONE,
            REQUESTS | NOISY,
        ] {
            let mut script = Script {
                switches,
                contents: request.clone(),
                ..Script::default()
            };
            script.chain(&[
                (CONTENTS, 40, false),
                (CONTENTS + 40, 16, false),
                (ANSWER, 64, true),
            ]);
            script.chain(&[
                (CONTENTS, 56, false),
                (ANSWER, 16, true),
                (ANSWER + 64, 8, true),
            ]);
            script.chain(&[(CONTENTS, 56, false)]);
            script.chain(&[(CONTENTS, 55, false), (ANSWER, 64, true)]);
            seeds.push(script.write());
        }
    }
    seeds
}
