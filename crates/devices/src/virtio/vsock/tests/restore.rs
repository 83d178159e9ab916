//! Snapshots: the reset that a restored guest gets, and the connections that the saved one keeps.

use super::super::engine::RESET_TIME;
use super::super::packet::Op;
use super::super::rings::QUEUE_SIZES;
use super::super::testing::{EVENT_IDX, GUEST_CID, Guest};
use super::super::{CONNECTION_LIMIT, SavedConnection, Vsock, VsockArgs, VsockError, VsockState};
use super::{Host, noise, read_ok};
use crate::bus::BusDevice;
use crate::virtio::device::VirtioDevice;
use crate::virtio::mmio::{MmioTransport, MmioTransportState, QueueState};
use crate::virtio::testing::{Buffer, DriverQueue, ThreadWorkers, memory};
use std::io::{Read, Write};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// A guest with connections, saved; the guest continues with its memory.
fn saved(host: &Host) -> (Guest, Vec<virtio_queue::Queue>, VsockState) {
    let mut guest = host.guest().start();
    let listener = host.listen(7);
    guest.connect((7, 1));
    guest.connect((7, 2));
    drop(listener);
    std::fs::remove_file(host.folder.path().join("v_7")).unwrap();
    let queues = guest.pause();
    guest.take_returned();
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
    // The saved VM may still run with its own socket.
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
    // Saving a device that was restored but never ran keeps everything.
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
    assert_eq!(guest.events, [0], "one event");
}

#[test]
fn programs_wait_until_the_restored_guest_has_seen_the_reset() {
    let host = Host::new();
    let (mut guest, queues, state) = saved(&host);
    let begun = Instant::now();
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
    // On a busy host this may take longer than the programs wait.
    let is_over = begun.elapsed() >= RESET_TIME;
    assert!(is_over || guest.requests.is_empty(), "too early");
    guest.restock_event(0);
    let ports = guest.accept(80);
    read_ok(&mut program);
    guest.restock();
    program.write_all(b"hi").unwrap();
    guest.until("hi", |guest| guest.socket(ports).inbox == *b"hi");
}

#[test]
fn programs_do_not_wait_forever_for_a_driver_that_ignores_events() {
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

/// The same as [`restore`], without a thread: only what the test asks for happens.
fn restore_by_hand(host: &Host, guest: Guest, state: &VsockState) -> Guest {
    let mut guest = guest.by_hand();
    restore(host, &mut guest, state);
    guest
}

#[test]
fn the_transport_reset_is_sent_at_activation() {
    let host = Host::new();
    let (guest, queues, state) = saved(&host);
    let mut guest = restore_by_hand(&host, guest, &state);
    let events = guest.event_buffers_returned();
    let packets = guest.receive_buffers_returned();
    let told = guest.interrupt.counts().used_buffers;
    guest.activate(queues);
    // No thread has run, and no time has passed.
    assert_eq!(guest.event_buffers_returned() - events, 1);
    assert_eq!(guest.receive_buffers_returned() - packets, 2);
    assert_eq!(guest.interrupt.counts().used_buffers - told, 1);
    guest.take_returned();
    assert_eq!(guest.events, [0]);
    assert!(guest.socket((7, 1)).reset && guest.socket((7, 2)).reset);
    guest.settle();
    assert_eq!(guest.events, [0], "one event");
}

#[test]
fn a_restored_guest_connects_at_once() {
    let host = Host::new();
    let (guest, queues, state) = saved(&host);
    let mut guest = restore_by_hand(&host, guest, &state);
    let listener = std::os::unix::net::UnixListener::bind(host.folder.path().join("w_9")).unwrap();
    // The guest never returns an event buffer, but programs do not wait for it.
    guest.restocks = false;
    guest.activate(queues);
    guest.send_op((9, 5), Op::Request, 0);
    guest.settle();
    assert!(guest.socket((9, 5)).accepted);
    guest.push((9, 5), b"first words");
    guest.settle();
    let mut bytes = [0; 11];
    listener.accept().unwrap().0.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"first words");
}

#[test]
fn each_connection_is_reset_once_with_few_receive_buffers() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let queues = guest.pause();
    let connections: Vec<SavedConnection> = (0..1000)
        .map(|guest_port| SavedConnection {
            host_port: 7,
            guest_port,
        })
        .collect();
    let state = VsockState {
        cid: GUEST_CID,
        connections,
    };
    restore(&host, &mut guest, &state);
    guest.activate(queues);
    guest.until("1000 RSTs", |guest| guest.seen.len() >= 1000);
    thread::sleep(Duration::from_millis(5));
    guest.pump();
    let mut ports: Vec<u32> = guest.seen.iter().map(|header| header.dst_port).collect();
    ports.sort_unstable();
    assert_eq!(ports, (0..1000).collect::<Vec<u32>>());
    assert!(guest.seen.iter().all(|header| header.op == Op::Rst as u16));
}

#[test]
fn a_transport_reset_waits_for_an_event_buffer() {
    let host = Host::new();
    let mut guest = host.guest_without_buffers().start_by_hand();
    guest.settle();
    let queues = guest.pause();
    let state = guest.device.save();
    restore(&host, &mut guest, &state);
    guest.activate(queues);
    guest.settle();
    assert!(guest.events.is_empty());
    guest.restocks = false;
    guest.restock_event(0);
    guest.settle();
    assert_eq!(guest.events, [0]);
}

#[test]
fn the_saved_vms_connections_and_their_data_survive_a_save() {
    let host = Host::new();
    let mut guest = host.guest().start();
    let mut stream = host.guest_to_host(&mut guest, (7, 1));
    let mut program = host.call(80);
    let ports = guest.accept(80);
    read_ok(&mut program);
    let (up, down) = (noise(5, 1 << 20), noise(6, 1 << 20));
    let (mut sent, mut received, mut heard) = (0, Vec::new(), Vec::new());
    stream.set_nonblocking(true).unwrap();
    program.set_nonblocking(true).unwrap();
    let mut written = 0;
    let mut saves = 0;
    guest.until("both ways", |guest| {
        sent += guest.push_some((7, 1), &up[sent..]);
        written += program.write(&down[written..]).unwrap_or(0);
        received.extend(guest.read(ports));
        let mut some = [0; 9000];
        let count = stream.read(&mut some).unwrap_or(0);
        heard.extend_from_slice(&some[..count]);
        if (received.len() + heard.len()) / 100_000 > saves {
            saves += 1;
            let queues = guest.pause();
            let state = guest.device.save();
            assert_eq!(state.connections.len(), 2, "{state:?}");
            guest.activate(queues);
        }
        received.len() >= down.len() && heard.len() >= up.len()
    });
    assert!(saves > 5, "{saves}");
    assert!(received == down && heard == up);
    assert!(
        guest.events.is_empty(),
        "a guest that continues gets no event"
    );
}

#[test]
fn a_new_context_id_is_a_configuration_change() {
    let host = Host::new();
    let (guest, queues, state) = saved(&host);
    let mut guest = guest.by_hand();
    let path = host.folder.path().join("w");
    guest.device = Vsock::restore(VsockArgs { cid: 99, path }, &state).unwrap();
    guest.activate(queues);
    assert_eq!(guest.interrupt.counts().config_changed, 1);
    let mut cid = [0; 8];
    guest.device.read_config(0, &mut cid);
    assert_eq!(u64::from_le_bytes(cid), 99);
    let queues = guest.pause();
    guest.activate(queues);
    assert_eq!(guest.interrupt.counts().config_changed, 1, "notified once");
}

#[test]
fn a_request_from_the_former_context_id_is_refused_at_once() {
    let host = Host::new();
    let (guest, queues, state) = saved(&host);
    let mut guest = guest.by_hand();
    let path = host.folder.path().join("w");
    let _listener = std::os::unix::net::UnixListener::bind(host.folder.path().join("w_9")).unwrap();
    guest.device = Vsock::restore(VsockArgs { cid: 99, path }, &state).unwrap();
    guest.activate(queues);
    guest.cid = 99;
    let early = guest.header((9, 5), Op::Request);
    guest.send(
        super::super::packet::Header {
            src_cid: GUEST_CID,
            ..early
        },
        &[],
    );
    guest.settle();
    assert!(guest.socket((9, 5)).reset && !guest.socket((9, 5)).accepted);
    guest.sockets.clear();
    guest.send_op((9, 5), Op::Request, 0);
    guest.settle();
    assert!(guest.socket((9, 5)).accepted);
}

#[test]
fn the_same_context_id_is_no_configuration_change() {
    let host = Host::new();
    let (mut guest, queues, state) = saved(&host);
    restore(&host, &mut guest, &state);
    guest.activate(queues);
    assert_eq!(guest.interrupt.counts().config_changed, 0);
}

/// Through the registers: the interrupt is raised with its reason, and a driver that was reading
/// the old context id reads again.
#[test]
fn the_transport_interrupts_the_guest_on_resume() {
    let host = Host::new();
    let memory = memory(1 << 20);
    let mut rings: Vec<DriverQueue> = (1..)
        .zip(QUEUE_SIZES)
        .map(|(place, size)| DriverQueue::new(memory.clone(), 0x4000 * place, size))
        .collect();
    for slot in 0..8 {
        rings[2].add(&[Buffer::writable(0x8_0000 + 8 * slot, 8)]);
    }
    let queues = rings.iter().map(|ring| QueueState {
        size: ring.size().into(),
        ready: true,
        descriptors: ring.descriptors(),
        driver_ring: ring.avail(),
        device_ring: ring.used(),
        next_avail: 0,
        next_used: 0,
    });
    let transport_state = MmioTransportState {
        device_type: 19,
        status: 15,
        device_features_select: 0,
        driver_features_select: 0,
        driver_features: 1 << 32 | EVENT_IDX,
        queue_select: 2,
        queues: queues.collect(),
        interrupt_status: 0,
        config_generation: 41,
        needs_reset: false,
    };
    let state = VsockState {
        cid: GUEST_CID,
        connections: Vec::new(),
    };
    for (cid, reasons, generation) in [(GUEST_CID, 1, 41), (99, 3, 42)] {
        let args = VsockArgs { cid, ..host.args() };
        let line = EventFd::new(EFD_NONBLOCK).unwrap();
        let mut transport = MmioTransport::restore(
            Vsock::restore(args, &state).unwrap(),
            crate::virtio::testing::copy_of(&memory),
            Arc::new(ThreadWorkers),
            line.try_clone().unwrap(),
            &transport_state,
        )
        .unwrap();
        let register = |transport: &mut MmioTransport<Vsock>, offset| {
            let mut value = [0; 4];
            transport.read(offset, &mut value);
            u32::from_le_bytes(value)
        };
        assert!(line.read().is_err(), "not before it runs");
        transport.resume().unwrap();
        assert!(line.read().is_ok());
        assert_eq!(register(&mut transport, 0x60), reasons);
        assert_eq!(register(&mut transport, 0xfc), generation);
        assert_eq!(u64::from(register(&mut transport, 0x100)), cid);
    }
}
