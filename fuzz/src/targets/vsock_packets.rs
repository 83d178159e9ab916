//! A socket device whose guest, host programs and VMM do anything: packets
//! right and wrong, calls, pauses, resets.

use crate::Target;
use crate::scratch;
use jiffy_devices::virtio::vsock::testing::run_scenario;

/// This target.
pub const TARGET: Target = Target {
    name: "vsock_packets",
    covers: &["crates/devices/src/virtio/vsock"],
    seeds: all_seeds,
    run,
};

fn run(input: &[u8]) {
    run_scenario(scratch::folder(), input)
}

/// An action, with small and with large numbers after it.
fn action(action: u8) -> Vec<u8> {
    let tail = [0, 1, 2, 3, 4, 100, 200, 255];
    [&[action][..], &tail, &[action], &[0; 8]].concat()
}

fn all_seeds() -> Vec<Vec<u8>> {
    // Actions are told apart modulo 20; after each come what it needs.
    let packet = |op: u8, flags: u8| vec![0, 0, 1, 2, 1, op, flags, 23];
    let data = |length: u32| [&[0, 0, 1, 2, 0][..], &length.to_le_bytes(), &[23]].concat();
    let says = |length: u32| [&[11][..], &length.to_le_bytes(), &[0]].concat();
    let hears = |length: u32| [&[13][..], &length.to_le_bytes(), &[0]].concat();
    let (pump, accept, pause) = (vec![7], vec![10, 1], vec![15]);
    let (call, answer) = (vec![8, 1, 5], vec![9]);
    let open = [packet(1, 0), pump.clone(), accept].concat();
    let called = [call, pump.clone(), answer, pump.clone()].concat();
    vec![
        open.clone(),
        [
            open.clone(),
            data(60_000),
            hears(60_000),
            says(60_000),
            pump.clone(),
        ]
        .concat(),
        [
            open.clone(),
            data(60_000).repeat(6),
            packet(4, 3),
            hears(65_000),
        ]
        .concat(),
        [
            open.clone(),
            packet(6, 0),
            packet(7, 0),
            pump.clone(),
            packet(3, 0),
        ]
        .concat(),
        [
            open.clone(),
            says(5_000),
            vec![14, 0, 0],
            pump.clone(),
            packet(4, 2),
        ]
        .concat(),
        [
            called.clone(),
            says(9_000),
            pause.clone(),
            pump.clone(),
            vec![14, 3, 0],
        ]
        .concat(),
        [called, pause, vec![16, 0], pump.clone(), open].concat(),
        [vec![17], packet(2, 0).repeat(80), vec![18], pump].concat(),
    ]
    .into_iter()
    .chain((0..32).map(action))
    .collect()
}
