//! Balloons that are saved with requests in progress.

use super::super::{BalloonState, RestoreError};
use super::*;
use crate::virtio::mmio::MmioTransport;
use crate::virtio::testing::{ThreadWorkers, copy_of};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const FIRST: u32 = (FREE / PAGE) as u32;

#[test]
fn requests_left_waiting_are_answered_once_after_a_restore() {
    let mut guest = Guest::new();
    let buffer = guest.numbers(&[FIRST]);
    guest.queue(INFLATE).add(&[buffer]);
    guest.queue(DEFLATE).add(&[buffer]);
    let report = Buffer::writable(FREE + PAGE, PAGE as u32);
    guest.queue(REPORTING).add(&[report]);
    // The device was not notified yet.
    let (memory, queues) = (copy_of(&guest.memory), guest.queues.clone());
    let (balloon, places) = guest.stop();
    let host = Arc::new(Host::default());
    let restored = Balloon::restore(args(&host), &balloon.save()).unwrap();
    assert_eq!(restored.save(), balloon.save());
    let mut device = Running::start(restored, &memory, places, ALL);
    let first = u64::from(FIRST);
    assert_eq!(host.take(), [(first, 1), (first + 1, 1)]);
    for (index, queue) in (0..).zip(queues) {
        let mut queue = queue.over(memory.clone());
        assert_eq!(queue.next_used().is_some(), index != STATISTICS);
        device.ring(index);
        assert_eq!(queue.next_used(), None);
    }
    assert_eq!(host.take(), []);
}

#[test]
fn a_state_has_the_configuration_that_the_driver_knows() {
    let mut guest = Guest::new();
    guest.balloon().set_target(9).unwrap();
    guest.balloon().write_config(4, &2304u32.to_le_bytes());
    guest.balloon().write_config(12, &1u32.to_le_bytes());
    let state = guest.balloon().save();
    let expected = BalloonState {
        target_pages: 2304,
        actual_pages: 2304,
        poison: 1,
        untold: false,
    };
    assert_eq!(state, expected);
    let restored = Balloon::restore(args(&guest.host), &state).unwrap();
    assert_eq!(restored.save(), state);
    assert!(restored.is_full());
    assert_eq!(restored.target_mib(), 9);
}

#[test]
fn hostile_states_are_refused() {
    let host = Arc::new(Host::default());
    let restore = |target_pages| {
        let state = BalloonState {
            target_pages,
            ..BalloonState::default()
        };
        Balloon::restore(args(&host), &state).err()
    };
    let most = (RAM / PAGE) as u32;
    assert_eq!(restore(most), None);
    for (pages, target_mib) in [(most + 1, 33), (u32::MAX, 1 << 24)] {
        let ram_mib = 32;
        let expected = RestoreError::Target {
            target_mib,
            ram_mib,
        };
        assert_eq!(restore(pages), Some(expected));
    }
}

#[test]
fn a_state_survives_serialisation() {
    let state = BalloonState {
        target_pages: 1,
        actual_pages: 2,
        poison: 3,
        untold: true,
    };
    let text = serde_json::to_string(&state).unwrap();
    assert_eq!(serde_json::from_str::<BalloonState>(&text).unwrap(), state);
    let more = text.replace("\"poison\"", "\"x\":1,\"poison\"");
    assert!(serde_json::from_str::<BalloonState>(&more).is_err());
}

/// Writes a register of the transport.
fn write(transport: &mut MmioTransport<Balloon>, register: u64, value: u32) {
    use crate::bus::BusDevice;
    transport.write(register, &value.to_le_bytes());
}

fn line() -> EventFd {
    EventFd::new(EFD_NONBLOCK).unwrap()
}

/// The whole path: registers, notifications on the vCPU, saving in between, and the memory of
/// another process.
#[test]
fn the_device_is_saved_and_restored_through_its_transport() {
    let memory = memory(RAM as usize);
    let host = Arc::new(Host::default());
    let workers = Arc::new(ThreadWorkers);
    let balloon = Balloon::new(args(&host));
    let mut transport =
        MmioTransport::new(balloon, memory.clone(), workers.clone(), line()).unwrap();
    assert!(transport.doorbells().is_empty());
    for status in [1, 3] {
        write(&mut transport, 0x70, status);
    }
    for (select, features) in [(0, ALL as u32), (1, 1)] {
        write(&mut transport, 0x24, select);
        write(&mut transport, 0x20, features);
    }
    write(&mut transport, 0x70, 11);
    let mut queues = Vec::new();
    for (index, size) in (0u32..).zip(QUEUE_SIZES) {
        let queue = DriverQueue::new(memory.clone(), 0x1000 * (1 + u64::from(index)), size);
        write(&mut transport, 0x30, index);
        write(&mut transport, 0x38, size.into());
        write(&mut transport, 0x80, queue.descriptors() as u32);
        write(&mut transport, 0x90, queue.avail() as u32);
        write(&mut transport, 0xa0, queue.used() as u32);
        write(&mut transport, 0x44, 1);
        queues.push(queue);
    }
    write(&mut transport, 0x70, 15);

    let pages: Vec<u8> = (0..256).flat_map(|n| (FIRST + n).to_le_bytes()).collect();
    queues[0].store(NUMBERS, &pages);
    queues[0].add(&[Buffer::readable(NUMBERS, 1024)]);
    write(&mut transport, 0x50, 0);
    assert_eq!(host.take(), [(u64::from(FIRST), 256)]);
    write(&mut transport, 0x104, 256);
    assert_eq!(transport.device().actual_mib(), 1);
    queues[3].add(&[Buffer::writable(FREE + (4 << 20), 2 << 20)]);

    transport.device_mut().set_target(8).unwrap();
    transport.pause();
    transport.device_mut().set_target(4).unwrap();
    let saved = (transport.save().unwrap(), transport.device().save());
    let memory = copy_of(&memory);
    let balloon = Balloon::restore(args(&host), &saved.1).unwrap();
    let line = line();
    let mut transport = MmioTransport::restore(
        balloon,
        memory.clone(),
        workers,
        line.try_clone().unwrap(),
        &saved.0,
    )
    .unwrap();
    assert!(line.read().is_err());
    transport.resume().unwrap();
    assert!(
        line.read().is_ok(),
        "the guest is notified of target and report"
    );
    assert_eq!(host.take(), [(FREE / PAGE + 1024, 512)]);
    let mut queue = queues[3].over(memory.clone());
    assert!(queue.next_used().is_some());
    let state = transport.device().save();
    assert_eq!((state.target_pages, state.actual_pages), (1024, 256));
    assert!(!state.untold);
    // A reset discards what the driver reported.
    write(&mut transport, 0x70, 0);
    assert_eq!(transport.device().actual_mib(), 0);
}
