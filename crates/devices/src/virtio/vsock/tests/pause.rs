//! Pauses, driver resets and snapshots.

use super::super::packet::Op;
use super::super::testing::{EVENT_IDX, GUEST_CID, Guest};
use super::super::{CONNECTION_LIMIT, SavedConnection, Vsock, VsockArgs, VsockError, VsockState};
use super::{Host, noise, read_ok};
use std::io::{Read, Write};
use std::thread;
use std::time::Duration;

#[test]
fn connections_survive_pauses_with_nothing_lost_or_doubled() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let stream = host.guest_to_host(&mut guest, (7, 1));
    let (up, down) = (noise(1, 3 << 20), noise(2, 3 << 20));
    let (sent_down, length) = (down.clone(), up.len());
    let mut writer = stream.try_clone().unwrap();
    let sender = thread::spawn(move || writer.write_all(&sent_down).unwrap());
    let reader = thread::spawn(move || {
        let mut came = vec![0; length];
        { stream }.read_exact(&mut came).unwrap();
        came
    });
    let (mut sent, mut came, mut pauses) = (0, Vec::new(), 0);
    guest.until("all bytes both ways", |guest| {
        sent += guest.push_some((7, 1), &up[sent..]);
        came.extend(guest.read((7, 1)));
        if came.len() / 30_000 > pauses {
            pauses += 1;
            let queues = guest.pause();
            guest.activate(queues);
        }
        sent == up.len() && came.len() >= down.len()
    });
    assert!(pauses > 10, "{pauses}");
    assert!(came == down, "host to guest");
    sender.join().unwrap();
    assert!(reader.join().unwrap() == up, "guest to host");
}

#[test]
fn a_program_may_call_during_a_pause() {
    let host = Host::new();
    let mut guest = host.guest().start();
    guest.until("idle", |_| true);
    let queues = guest.pause();
    let mut program = host.call(80);
    program.write_all(b"early").unwrap();
    thread::sleep(Duration::from_millis(20));
    guest.activate(queues);
    let ports = guest.accept(80);
    read_ok(&mut program);
    guest.until("early", |guest| guest.socket(ports).inbox == *b"early");
}

#[test]
fn a_driver_that_starts_anew_has_no_connections() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut stream = host.guest_to_host(&mut guest, (7, 1));
    guest.reset_driver();
    assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
    assert_eq!(guest.device.connection_count(), 0);
    std::fs::remove_file(host.folder.path().join("v_7")).unwrap();
    let _again = host.guest_to_host(&mut guest, (7, 1));
    assert!(guest.events.is_empty());
}

/// A guest with connections, saved; the guest lives on with its memory.
fn saved(host: &Host) -> (Guest, Vec<virtio_queue::Queue>, VsockState) {
    let mut guest = host.guest().start();
    let listener = host.listen(7);
    guest.connect((7, 1));
    guest.connect((7, 2));
    drop(listener);
    std::fs::remove_file(host.folder.path().join("v_7")).unwrap();
    let queues = guest.pause();
    let state = guest.device.save();
    assert_eq!(state.cid, GUEST_CID);
    let ports = |guest_port| SavedConnection {
        host_port: 7,
        guest_port,
    };
    assert_eq!(state.connections, [ports(1), ports(2)]);
    (guest, queues, state)
}

/// Replaces the guest's device with one restored from `state`.
fn restore(host: &Host, guest: &mut Guest, state: &VsockState) {
    // The saved VM may still run elsewhere, with its own socket.
    let path = host.folder.path().join("w");
    let args = VsockArgs {
        path,
        ..host.args()
    };
    guest.device = Vsock::restore(args, state).unwrap();
}

#[test]
fn a_restored_guest_is_told_that_its_connections_are_gone() {
    let host = Host::new();
    let (mut guest, queues, state) = saved(&host);
    restore(&host, &mut guest, &state);
    // Saving what was restored but never ran keeps everything.
    assert_eq!(guest.device.save(), state);
    guest.activate(queues);
    guest.until("event and RSTs", |guest| {
        guest.events == [0] && guest.socket((7, 1)).reset && guest.socket((7, 2)).reset
    });
    let listener = std::os::unix::net::UnixListener::bind(host.folder.path().join("w_7")).unwrap();
    guest.sockets.clear();
    guest.connect((7, 1));
    guest.push((7, 1), b"new life");
    let mut bytes = [0; 8];
    listener.accept().unwrap().0.read_exact(&mut bytes).unwrap();
    assert_eq!(guest.events, [0], "told once");
}

#[test]
fn programs_wait_until_the_restored_guest_has_seen_the_reset() {
    let host = Host::new();
    let (mut guest, queues, state) = saved(&host);
    restore(&host, &mut guest, &state);
    let mut program =
        std::os::unix::net::UnixStream::connect(host.folder.path().join("w")).unwrap();
    program.write_all(b"CONNECT 80\n").unwrap();
    guest.restocks = false;
    guest.activate(queues);
    guest.until("event", |guest| guest.events == [0]);
    for _ in 0..100 {
        guest.pump();
        thread::sleep(Duration::from_millis(1));
    }
    assert!(guest.requests.is_empty(), "too early");
    guest.restock_event(0);
    let ports = guest.accept(80);
    read_ok(&mut program);
    guest.restock();
    program.write_all(b"hi").unwrap();
    guest.until("hi", |guest| guest.socket(ports).inbox == *b"hi");
}

#[test]
fn programs_do_not_wait_for_ever_for_a_driver_that_ignores_events() {
    let host = Host::new();
    let (mut guest, queues, state) = saved(&host);
    restore(&host, &mut guest, &state);
    let mut program =
        std::os::unix::net::UnixStream::connect(host.folder.path().join("w")).unwrap();
    program.write_all(b"CONNECT 80\n").unwrap();
    guest.restocks = false;
    guest.activate(queues);
    guest.accept(80);
    read_ok(&mut program);
}

#[test]
fn a_restored_vm_may_have_another_context_id() {
    let host = Host::new();
    let (mut guest, _, state) = saved(&host);
    let path = host.folder.path().join("w");
    guest.device = Vsock::restore(VsockArgs { cid: 99, path }, &state).unwrap();
    assert_eq!(guest.device.save().cid, 99);
}

#[test]
fn hostile_states_are_refused() {
    let host = Host::new();
    let refuse = |state: &VsockState| Vsock::restore(host.args(), state).err().unwrap();
    for cid in [0, 1, 2, u64::from(u32::MAX), u64::MAX] {
        let state = VsockState {
            cid,
            connections: Vec::new(),
        };
        assert!(matches!(refuse(&state), VsockError::Cid(found) if found == cid));
        let args = VsockArgs { cid, ..host.args() };
        assert!(matches!(Vsock::new(args), Err(VsockError::Cid(found)) if found == cid));
    }
    let one = SavedConnection {
        host_port: 1,
        guest_port: 1,
    };
    let state = VsockState {
        cid: GUEST_CID,
        connections: vec![one; 2 * CONNECTION_LIMIT + 1],
    };
    assert!(matches!(refuse(&state), VsockError::SavedConnections(_)));
    assert!(!host.path().exists(), "nothing is left behind");
}

#[test]
fn a_state_survives_serialisation() {
    let state = VsockState {
        cid: 7,
        connections: vec![SavedConnection {
            host_port: 1,
            guest_port: 2,
        }],
    };
    let text = serde_json::to_string(&state).unwrap();
    assert_eq!(serde_json::from_str::<VsockState>(&text).unwrap(), state);
    assert!(serde_json::from_str::<VsockState>(r#"{"cid":7,"connections":[],"x":1}"#).is_err());
}

#[test]
fn requests_not_yet_sent_survive_a_pause_too() {
    let host = Host::new();
    let mut guest = Guest::new(Vsock::new(host.args()).unwrap(), EVENT_IDX).start();
    guest.restocks = false;
    let mut stream = host.guest_to_host(&mut guest, (7, 1));
    stream.write_all(&noise(1, 300_000)).ok();
    let queues = guest.pause();
    guest.activate(queues);
    guest.tell((9, 9), Op::CreditUpdate, 0);
    let queues = guest.pause();
    guest.activate(queues);
    guest.restock();
    let mut came = Vec::new();
    guest.until("all of it, and the RST", |guest| {
        came.extend(guest.read((7, 1)));
        came.len() >= 300_000 && guest.socket((9, 9)).reset
    });
    assert!(came == noise(1, 300_000));
}
