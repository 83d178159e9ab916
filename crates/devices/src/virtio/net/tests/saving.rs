use super::driver::*;
use crate::virtio::device::{Activation, ActiveQueue, VirtioDevice};
use crate::virtio::net::{Backend, Net, RestoreError};
use crate::virtio::testing::{Buffer, DriverQueue, Running, TestInterrupt, ThreadWorkers, copy_of};
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use virtio_queue::{Queue, QueueT};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Runs the device again on the queues that it returned.
pub fn restart(
    mut device: Net,
    memory: &Arc<crate::GuestMemory>,
    queues: Vec<Queue>,
) -> Running<Net> {
    let interrupt = TestInterrupt::new();
    let mut doorbells = Vec::new();
    let active = (0u16..)
        .zip(queues)
        .map(|(index, queue)| {
            let doorbell = EventFd::new(EFD_NONBLOCK).unwrap();
            doorbells.push(doorbell.try_clone().unwrap());
            Some(ActiveQueue {
                index,
                queue,
                doorbell,
            })
        })
        .collect();
    device
        .activate(Activation {
            memory: memory.clone(),
            queues: active,
            interrupt: interrupt.clone(),
            features: USUAL,
            workers: Arc::new(ThreadWorkers),
        })
        .unwrap();
    Running {
        device,
        doorbells,
        interrupt,
    }
}

#[test]
fn buffers_fetched_ahead_survive_a_pause() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    guest.offer_buffers(60, 1536);
    hosts[0].send(&with_header(&frame(1, 60))).unwrap();
    assert_eq!(guest.wait_received()[30], 1);
    let (device, queues) = guest.device.stop();
    assert_eq!((queues[0].next_avail(), queues[0].next_used()), (1, 1));
    guest.device = restart(device, &guest.memory, queues);
    for number in 2..60 {
        hosts[0].send(&with_header(&frame(number, 60))).unwrap();
        assert_eq!(guest.wait_received()[30], number);
    }
}

#[test]
fn a_frame_that_waits_for_buffers_survives_a_pause() {
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    guest.offer_buffers(2, 1536);
    let bytes = with_header(&frame(9, 20_000));
    hosts[0].send(&bytes).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    let (device, queues) = guest.device.stop();
    assert_eq!(queues[0].next_avail(), 0);
    guest.device = restart(device, &guest.memory, queues);
    for number in 2..20 {
        guest.queues[0].add(&[Buffer::writable(RECEIVE + number * 1536, 1536)]);
    }
    guest.device.ring(0);
    assert_eq!(guest.wait_received()[12..], bytes[12..]);
}

/// A frame that was sent before a capture is not sent again, and one that was not is sent: by the
/// VM that continues and by the restored one.
#[test]
fn frames_in_flight_over_a_capture_are_sent_once() {
    const FRAMES: usize = 120;
    let (net, hosts) = on_datagrams(1);
    let mut guest = Guest::start(net, USUAL);
    for number in 0..FRAMES {
        let address = SEND + number as u64 * 0x4000;
        let bytes = with_header(&frame(number as u8, 9000));
        guest.queues[1].store(address, &bytes);
        guest.queues[1].add(&[Buffer::readable(address, bytes.len() as u32)]);
    }
    guest.device.ring(1);
    while guest.queues[1].used_index() == 0 {
        std::thread::yield_now();
    }
    let (device, queues) = guest.device.stop();
    let state = device.save();
    let sent = usize::from(queues[1].next_used());
    assert_eq!(usize::from(queues[1].next_avail()), sent);
    assert!(sent > 0 && sent < FRAMES);

    let memory = copy_of(&guest.memory);
    let (ours, clone) = UnixDatagram::pair().unwrap();
    clone
        .set_read_timeout(Some(crate::virtio::testing::TIMEOUT))
        .unwrap();
    let restored = Net::restore(args(Backend::Datagrams(vec![ours])), &state).unwrap();
    let saved = queues
        .iter()
        .map(|queue| Queue::try_from(queue.state()).unwrap());
    let _restored = restart(restored, &memory, saved.collect());
    for number in sent..FRAMES {
        assert_eq!(received_by(&clone)[30], number as u8);
    }
    let _running = restart(device, &guest.memory, queues);
    for number in 0..FRAMES {
        assert_eq!(received_by(&hosts[0])[30], number as u8);
    }
    let _: &DriverQueue = &guest.queues[1];
}

#[test]
fn a_clone_cannot_send_with_its_former_address() {
    let (net, _hosts) = on_datagrams(1);
    let state = net.save();
    let (ours, host) = UnixDatagram::pair().unwrap();
    let mut args = args(Backend::Datagrams(vec![ours]));
    args.mac.0[5] = 99;
    let mac = args.mac;
    let mut guest = Guest::start(Net::restore(args, &state).unwrap(), USUAL);
    guest.send(&with_header(&frame(1, 60)));
    let mut own = frame(2, 60);
    own[6..12].copy_from_slice(&mac.0);
    guest.send(&with_header(&own));
    assert_eq!(received_by(&host)[12..], own);
    assert_eq!(guest.device.device.totals().sent_spoofed, 1);
}

#[test]
fn a_reset_clears_the_drivers_settings() {
    let (net, _hosts) = on_datagrams(2);
    let mut guest = Guest::start(net, USUAL | 1 << 22);
    assert_eq!(guest.command(&[4, 0, 2, 0]), 0);
    let (mut device, _) = guest.device.stop();
    device.reset();
    assert_eq!(device.save().used_pairs, 1);
}

#[test]
fn impossible_states_are_refused() {
    let (net, _hosts) = on_datagrams(2);
    let state = net.save();
    let restore = |change: fn(&mut crate::virtio::net::NetState)| {
        let mut state = state.clone();
        change(&mut state);
        let backend = Backend::Datagrams(vec![
            UnixDatagram::unbound().unwrap(),
            UnixDatagram::unbound().unwrap(),
        ]);
        Net::restore(args(backend), &state).unwrap_err()
    };
    assert!(matches!(
        restore(|state| state.pairs = 3),
        RestoreError::Pairs {
            saved: 3,
            actual: 2
        }
    ));
    for used in [0, 3, u16::MAX] {
        let mut state = state.clone();
        state.used_pairs = used;
        let backend = Backend::Datagrams(vec![
            UnixDatagram::unbound().unwrap(),
            UnixDatagram::unbound().unwrap(),
        ]);
        let error = Net::restore(args(backend), &state).unwrap_err();
        assert!(matches!(error, RestoreError::UsedPairs { .. }));
    }
}

#[test]
fn a_state_survives_serialisation() {
    let (net, _hosts) = on_datagrams(1);
    let state = net.save();
    let text = serde_json::to_string(&state).unwrap();
    assert_eq!(
        serde_json::from_str::<crate::virtio::net::NetState>(&text).unwrap(),
        state
    );
}
