//! A network interface whose driver does anything, on any of its queues, and whose host
//! sends frames of any length.

use crate::Target;
use crate::queue::{CONTENTS, Script};
use jiffy_devices::virtio::device::VirtioDevice;
use jiffy_devices::virtio::net::guard::{Guard, Range};
use jiffy_devices::virtio::net::{Backend, Mac, Net, NetArgs, header};
use jiffy_devices::virtio::queue::RateLimit;
use std::io::Write;
use std::os::unix::net::{UnixDatagram, UnixStream};

/// Which queue, in the lowest bits of the switches: two pairs and the control queue.
const QUEUE: u8 = 7;
const EVENT_IDX: u8 = 8;
const NOT_MERGEABLE: u8 = 16;
/// The host is passt.
const PASST: u8 = 32;
/// One pair.
const SINGLE: u8 = 64;
/// The driver was saved on a TAP interface, and a guard checks what it sends.
const RESTORED: u8 = 128;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const FEATURE_MERGEABLE: u64 = 1 << 15;
const FEATURE_EVENT_IDX: u64 = 1 << 29;
const SEND: u64 = 0x10000;

/// This target.
pub const TARGET: Target = Target {
    name: "net_queues",
    covers: &[
        "crates/devices/src/virtio/net",
        "crates/devices/src/virtio/queue",
    ],
    seeds: all_seeds,
    run,
};

enum Host {
    Tap(Vec<UnixDatagram>),
    Passt(UnixStream),
}

impl Host {
    fn new(passt: bool, pairs: usize) -> (Host, Backend) {
        if passt {
            let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
            theirs.set_nonblocking(true).expect("a socket");
            return (Host::Passt(theirs), Backend::Passt(ours));
        }
        let pairs = (0..pairs).map(|_| UnixDatagram::pair().expect("a pair of sockets"));
        let (ours, theirs): (Vec<_>, Vec<_>) = pairs.unzip();
        for host in &theirs {
            host.set_nonblocking(true).expect("a socket");
        }
        (Host::Tap(theirs), Backend::Datagrams(ours))
    }

    /// Sends bytes; those that do not fit are dropped.
    fn say(&mut self, bytes: &[u8]) {
        match self {
            Host::Tap(sockets) => {
                for socket in sockets {
                    let _ = socket.send(bytes);
                }
            }
            Host::Passt(stream) => {
                let _ = stream.write(bytes);
            }
        }
    }

    /// Nothing that the guest sent breaks a rule that the device knows.
    fn check(&self, features: u64) {
        let Host::Tap(sockets) = self else {
            return;
        };
        let mut bytes = vec![0; 1 << 17];
        for socket in sockets {
            while let Ok(count) = socket.recv(&mut bytes) {
                let (given, frame) = bytes[..count].split_first_chunk().expect("a header");
                assert!(frame.len() >= 14 && frame[6..12] == MAC);
                let checked = header::check(given, frame.len() as u32, features);
                assert_eq!(checked.as_ref(), Ok(given));
            }
        }
    }
}

fn run(data: &[u8]) {
    let script = Script::read(data);
    let has = |switch: u8| script.switches & switch != 0;
    let pairs = if has(SINGLE) || has(PASST) { 1 } else { 2 };
    let (mut host, backend) = Host::new(has(PASST), pairs);
    // The host sends first: a header or a length, then arbitrary bytes.
    let spoken = script.contents.len().min(usize::from(script.switches) * 9);
    host.say(&script.contents[..spoken]);
    host.say(&[0; 200]);
    let args = |backend, guard| NetArgs {
        mac: Mac(MAC),
        mtu: None,
        receive_limit: RateLimit::default(),
        send_limit: RateLimit::default(),
        guard,
        backend,
    };
    let net = if has(RESTORED) {
        let (_, other) = Host::new(false, pairs);
        let saved = Net::new(args(other, None)).expect("a device").save();
        Net::restore(args(backend, Some(guard())), &saved).expect("a restored device")
    } else {
        Net::new(args(backend, None)).expect("a device")
    };
    let mut features = net.features();
    if has(NOT_MERGEABLE) {
        features &= !FEATURE_MERGEABLE;
    }
    if !has(EVENT_IDX) {
        features &= !FEATURE_EVENT_IDX;
    }
    // Small rings, which have room between one another.
    let sizes = vec![64; net.queue_max_sizes().len()];
    let queue = u16::from(script.switches & QUEUE) % sizes.len() as u16;
    let net = script.play_on(net, &sizes, queue, features, has(EVENT_IDX), |_| {});
    let state = net.save();
    assert!((1..=state.pairs).contains(&state.used_pairs));
    host.check(features);
    let (_, backend) = Host::new(false, state.pairs.into());
    Net::restore(args(backend, None), &state).expect("what was saved is restored");
}

/// A guard with closed and open destinations.
fn guard() -> Guard {
    Guard {
        closed: vec![Range::new([10, 0, 0, 0].into(), 8)],
        name_servers: vec![[10, 0, 0, 53].into()],
        tcp: vec![(80, 90)],
    }
}

/// A datagram of UDP that is to be sent in pieces, after its header.
fn datagrams() -> Vec<u8> {
    let mut frame = vec![1, 5, 42, 0, 100, 0, 34, 0, 6, 0, 0, 0];
    frame.extend([0xff; 6]);
    frame.extend(MAC);
    frame.extend([8, 0, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0]);
    frame.extend([10, 118, 0, 2, 192, 0, 2, 1, 0x10, 0, 0, 53]);
    frame.resize(500, 7);
    frame
}

/// Frames, buffers and commands that are right, in all ways.
fn all_seeds() -> Vec<Vec<u8>> {
    let mut frame = vec![1, 1, 54, 0, 100, 0, 34, 0, 16, 0, 0, 0];
    frame.extend([0xff; 6]);
    frame.extend(MAC);
    frame.extend([8, 0]);
    frame.resize(400, 7);
    let length = frame.len() as u32;
    let mut seeds = Vec::new();
    let others = [EVENT_IDX, NOT_MERGEABLE, PASST, SINGLE, PASST | RESTORED];
    for switches in [0].into_iter().chain(others) {
        let mut script = |queue: u8, contents: &[u8], chains: &[&[(u64, u32, bool)]]| {
            let mut script = Script {
                switches: switches | queue,
                contents: contents.to_vec(),
                ..Script::default()
            };
            for chain in chains {
                script.chain(chain);
            }
            seeds.push(script.write());
        };
        script(
            1,
            &frame,
            &[
                &[(CONTENTS, length, false)],
                &[(CONTENTS, 8, false), (CONTENTS + 8, length - 8, false)],
            ],
        );
        script(1, &datagrams(), &[&[(CONTENTS, 500, false)]]);
        let mut plain = frame.clone();
        plain[..12].fill(0);
        script(1, &plain, &[&[(CONTENTS, length, false)]]);
        script(
            0,
            &frame,
            &[
                &[(SEND, 100, true)],
                &[(SEND + 4096, 12, true), (SEND + 8192, 100, true)],
                &[(SEND + 12288, 2048, true)],
            ],
        );
        for (queue, command) in [(4, &[4, 0, 2, 0][..]), (2, &[3, 0]), (4, &[9, 9])] {
            let data = command.len() as u32 - 2;
            let chain = [
                (CONTENTS, 2, false),
                (CONTENTS + 8, data, false),
                (SEND, 1, true),
            ];
            let mut contents = command[..2].to_vec();
            contents.resize(8, 0);
            contents.extend(&command[2..]);
            script(queue, &contents, &[&chain]);
        }
    }
    seeds
}
