//! The agent protocol's frames, cut anywhere, read as every kind of message.

use crate::Target;
use crate::input::Input;
use jiffy_wire::agent::{CopyFrame, ExecInput, ExecOutput, FromGuest, Request, Stat, ToGuest};
use jiffy_wire::frame::{Decoder, encode, to_vec};
use serde::{Serialize, de::DeserializeOwned};
use std::fmt::Debug;

/// This target.
pub const TARGET: Target = Target {
    name: "agent_frames",
    covers: &[
        "crates/guest/src/agent/connection.rs",
        "crates/wire/src/agent.rs",
        "crates/wire/src/frame.rs",
    ],
    seeds: all_seeds,
    run,
};

fn run(data: &[u8]) {
    let mut input = Input(data);
    let kind = input.u8();
    let cut = usize::from(input.u8()) + 1;
    let stream = input.rest();
    match kind % 7 {
        0 => decode::<ExecInput>(stream, cut),
        1 => decode::<ExecOutput>(stream, cut),
        2 => decode::<CopyFrame>(stream, cut),
        3 => decode::<FromGuest>(stream, cut),
        4 => decode::<ToGuest>(stream, cut),
        5 => decode::<Request>(stream, cut),
        _ => decode::<Stat>(stream, cut),
    }
}

/// Every decoded message can be encoded, and decodes to the same message.
fn decode<T: Serialize + DeserializeOwned + PartialEq + Debug>(stream: &[u8], cut: usize) {
    let mut decoder = Decoder::new();
    for piece in stream.chunks(cut) {
        decoder.push(piece);
        loop {
            match decoder.next::<T>() {
                Ok(Some(message)) => {
                    let mut bytes = Vec::new();
                    encode(&message, &mut bytes).expect("a decoded message fits a frame");
                    let mut again = Decoder::new();
                    again.push(&bytes);
                    assert_eq!(again.next::<T>(), Ok(Some(message)));
                    assert_eq!(again.pending(), 0);
                }
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
}

fn all_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    let started = to_vec(&ExecOutput::Started { pid: 7 }).expect("it fits");
    for kind in 0..7 {
        for cut in [0, 3, 255] {
            seeds.push([&[kind, cut][..], &started, &started].concat());
            for first in 0..12 {
                seeds.push(vec![kind, cut, 4, 0, 0, 0, first, 1, b'a', 0]);
            }
        }
    }
    seeds
}
