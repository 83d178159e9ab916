use super::registers::{QUEUE_NOTIFY, status};
use super::*;
use crate::GuestMemory;
use crate::bus::BusDevice;
use crate::virtio::device::{ActivateError, Activation, ActiveQueue, Interrupt, VirtioDevice};
use crate::virtio::testing::{DriverQueue, ThreadWorkers, memory};
use proptest::prelude::*;
use std::sync::Arc;
use virtio_queue::QueueT;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const MEMORY_BYTES: usize = 0x10000;
const SIZES: [u16; 2] = [8, 4];
const OFFERED: u64 = 1 << 0 | 1 << 5 | EVENT_IDX;
const EVENT_IDX: u64 = 1 << 29;
const CONFIG: [u8; 6] = [1, 2, 3, 4, 5, 6];

const ALL_STEPS: [u32; 4] = [1, 3, 0xb, 0xf];

/// A device that records its calls.
#[derive(Default)]
struct Fake {
    refuses: bool,
    inline: bool,
    running: Option<Activation>,
    activations: usize,
    notified: Vec<u16>,
    written: Vec<(u64, Vec<u8>)>,
}

impl VirtioDevice for Fake {
    fn device_type(&self) -> u32 {
        42
    }
    fn queue_max_sizes(&self) -> &[u16] {
        &SIZES
    }
    fn features(&self) -> u64 {
        OFFERED
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        for (byte, offset) in data.iter_mut().zip(offset..) {
            *byte = CONFIG.get(offset as usize).copied().unwrap_or(0);
        }
    }
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.written.push((offset, data.to_vec()));
    }
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        if self.refuses || activation.queues[0].is_none() {
            return Err(ActivateError::MissingQueue(0));
        }
        self.activations += 1;
        self.running = Some(activation);
        Ok(())
    }
    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let running = self.running.take();
        running.map_or(Vec::new(), |running| {
            running.queues.into_iter().flatten().collect()
        })
    }
    fn waits_on_doorbells(&self) -> bool {
        !self.inline
    }
    fn notified(&mut self, queue: u16) {
        self.notified.push(queue);
    }
}

/// A guest in front of a transport.
struct Guest {
    transport: MmioTransport<Fake>,
    memory: Arc<GuestMemory>,
    line: EventFd,
    queues: [DriverQueue; 2],
}

impl Guest {
    fn new(device: Fake) -> Guest {
        let memory = memory(MEMORY_BYTES);
        let line = EventFd::new(EFD_NONBLOCK).unwrap();
        let transport = MmioTransport::new(
            device,
            memory.clone(),
            Arc::new(ThreadWorkers),
            line.try_clone().unwrap(),
        )
        .unwrap();
        let queues = [
            DriverQueue::new(memory.clone(), 0x1000, SIZES[0]),
            DriverQueue::new(memory.clone(), 0x2000, SIZES[1]),
        ];
        Guest {
            transport,
            memory,
            line,
            queues,
        }
    }

    /// A guest whose driver has finished its initialisation.
    fn running() -> Guest {
        let mut guest = Guest::new(Fake::default());
        guest.start();
        guest
    }

    fn read(&mut self, offset: u64) -> u32 {
        let mut data = [0xee; 4];
        self.transport.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&mut self, offset: u64, value: u32) {
        self.transport.write(offset, &value.to_le_bytes());
    }

    fn status(&mut self) -> u32 {
        self.read(registers::STATUS)
    }

    fn set_status(&mut self, value: u32) -> u32 {
        self.write(registers::STATUS, value);
        self.status()
    }

    fn accept(&mut self, features: u64) -> u32 {
        self.set_status(1);
        self.set_status(3);
        for (select, half) in [(0, features as u32), (1, (features >> 32) as u32)] {
            self.write(registers::DRIVER_FEATURES_SELECT, select);
            self.write(registers::DRIVER_FEATURES, half);
        }
        self.set_status(0xb)
    }

    fn place_queue(&mut self, index: u32) {
        let queue = self.queues[index as usize].clone();
        self.write(registers::QUEUE_SELECT, index);
        self.write(registers::QUEUE_SIZE, u32::from(queue.size()));
        for (low, address) in [
            (registers::QUEUE_DESC_LOW, queue.descriptors()),
            (registers::QUEUE_DRIVER_LOW, queue.avail()),
            (registers::QUEUE_DEVICE_LOW, queue.used()),
        ] {
            self.write(low, address as u32);
            self.write(low + 4, (address >> 32) as u32);
        }
    }

    fn ready_queue(&mut self, index: u32) -> u32 {
        self.place_queue(index);
        self.write(registers::QUEUE_READY, 1);
        self.read(registers::QUEUE_READY)
    }

    fn start(&mut self) {
        assert_eq!(self.accept(registers::FEATURE_VERSION_1 | EVENT_IDX), 0xb);
        assert_eq!(self.ready_queue(0), 1);
        assert_eq!(self.ready_queue(1), 1);
        assert_eq!(self.set_status(0xf), 0xf);
    }
}

#[test]
fn a_driver_finds_the_device_and_brings_it_up() {
    let mut guest = Guest::new(Fake::default());
    assert_eq!(guest.read(0x00).to_le_bytes(), *b"virt");
    assert_eq!(guest.read(0x04), 2);
    assert_eq!(guest.read(0x08), 42);
    guest.write(registers::DEVICE_FEATURES_SELECT, 0);
    assert_eq!(guest.read(0x10), OFFERED as u32);
    guest.write(registers::DEVICE_FEATURES_SELECT, 1);
    assert_eq!(guest.read(0x10), 1, "VERSION_1");
    guest.write(registers::DEVICE_FEATURES_SELECT, 2);
    assert_eq!(guest.read(0x10), 0);
    guest.write(registers::QUEUE_SELECT, 1);
    assert_eq!(guest.read(0x34), 4);
    guest.write(registers::QUEUE_SELECT, 2);
    assert_eq!(guest.read(0x34), 0, "no third queue");
    assert_eq!(guest.read(0xb0), u32::MAX, "no shared memory");

    guest.start();
    let activation = guest.transport.device().running.as_ref().unwrap();
    assert_eq!(
        activation.features,
        registers::FEATURE_VERSION_1 | EVENT_IDX
    );
    for (index, active) in activation.queues.iter().enumerate() {
        let queue = &active.as_ref().unwrap().queue;
        assert_eq!(queue.desc_table(), guest.queues[index].descriptors());
        assert_eq!(queue.avail_ring(), guest.queues[index].avail());
        assert_eq!(queue.used_ring(), guest.queues[index].used());
        assert_eq!(queue.size(), SIZES[index]);
        assert!(queue.event_idx_enabled());
    }
}

#[test]
fn status_bits_are_set_in_order_and_only_a_reset_clears_them() {
    let mut guest = Guest::new(Fake::default());
    for impossible in [2, 8, 4, 9, 0x10, 0x41 << 8] {
        assert_eq!(guest.set_status(impossible), 0, "{impossible:#x}");
    }
    assert_eq!(guest.set_status(1), 1);
    assert_eq!(guest.set_status(3), 3);
    assert_eq!(guest.set_status(1), 3, "no step back");
    assert_eq!(guest.set_status(7), 3, "features come before DRIVER_OK");
    assert_eq!(guest.set_status(0x83), 0x83, "the driver may give up");
    assert_eq!(guest.set_status(0), 0);
}

#[test]
fn features_must_be_offered_and_include_version_1() {
    for refused in [0, OFFERED, registers::FEATURE_VERSION_1 | 1 << 1, u64::MAX] {
        let mut guest = Guest::new(Fake::default());
        assert_eq!(guest.accept(refused), 3, "{refused:#x}");
        assert_eq!(guest.set_status(0xf), 3);
        assert!(guest.transport.device().running.is_none());
    }
    let mut guest = Guest::new(Fake::default());
    assert_eq!(guest.accept(OFFERED | registers::FEATURE_VERSION_1), 0xb);
    // Features can't be changed any more.
    guest.write(registers::DRIVER_FEATURES_SELECT, 0);
    guest.write(registers::DRIVER_FEATURES, 0);
    guest.ready_queue(0);
    guest.set_status(0xf);
    let activation = guest.transport.device().running.as_ref().unwrap();
    assert_eq!(activation.features, OFFERED | registers::FEATURE_VERSION_1);
}

#[test]
fn a_queue_is_set_up_only_between_features_and_driver_ok() {
    let mut guest = Guest::new(Fake::default());
    assert_eq!(guest.ready_queue(0), 0, "before anything");
    guest.start();
    let before = guest.transport.device().activations;
    guest.write(registers::QUEUE_SELECT, 0);
    guest.write(registers::QUEUE_READY, 0);
    assert_eq!(guest.read(registers::QUEUE_READY), 1, "after DRIVER_OK");
    assert_eq!(guest.transport.device().activations, before);
}

#[test]
fn the_registers_of_a_ready_queue_are_read_only() {
    let mut guest = Guest::new(Fake::default());
    guest.accept(registers::FEATURE_VERSION_1);
    guest.ready_queue(0);
    for register in [0x38, 0x80, 0x84, 0x90, 0x94, 0xa0, 0xa4] {
        guest.write(register, 0x4000);
    }
    guest.set_status(0xf);
    let activation = guest.transport.device().running.as_ref().unwrap();
    let queue = &activation.queues[0].as_ref().unwrap().queue;
    assert_eq!(queue.desc_table(), guest.queues[0].descriptors());
    assert_eq!(queue.size(), SIZES[0]);
}

#[test]
fn an_invalid_queue_does_not_become_ready() {
    let end = MEMORY_BYTES as u32;
    for (what, register, value) in [
        ("no entries", 0x38, 0),
        ("not a power of two", 0x38, 3),
        ("too many", 0x38, 16),
        ("size beyond 16 bits", 0x38, 0x10008),
        ("descriptors misaligned", 0x80, 0x1008),
        ("descriptors at zero", 0x80, 0),
        ("descriptors reach out of memory", 0x80, end - 0x70),
        ("descriptors far away", 0x84, 1),
        ("descriptors wrap around", 0x84, u32::MAX),
        ("driver ring misaligned", 0x90, 0x1001),
        ("driver ring reaches out of memory", 0x90, end - 8),
        ("device ring misaligned", 0xa0, 0x1002),
        ("device ring reaches out of memory", 0xa0, end - 16),
    ] {
        let mut guest = Guest::new(Fake::default());
        guest.accept(registers::FEATURE_VERSION_1);
        guest.place_queue(0);
        guest.write(register, value);
        guest.write(registers::QUEUE_READY, 1);
        assert_eq!(guest.read(registers::QUEUE_READY), 0, "{what}");
        // The device needs that queue, so it requests a reset.
        assert_eq!(guest.set_status(0xf), 0xf | status::NEEDS_RESET, "{what}");
        assert_eq!(guest.read(registers::INTERRUPT_STATUS), 2);
        assert!(guest.line.read().is_ok());
    }
}

#[test]
fn a_device_that_fails_to_start_can_start_after_a_reset() {
    let mut guest = Guest::new(Fake {
        refuses: true,
        ..Fake::default()
    });
    guest.accept(registers::FEATURE_VERSION_1);
    guest.ready_queue(0);
    assert_eq!(guest.set_status(0xf), 0x4f);
    // Only a reset helps.
    assert_eq!(guest.set_status(0x4f), 0x4f);
    assert_eq!(guest.transport.device().activations, 0);
    assert_eq!(guest.set_status(0), 0);
    guest.transport.pause();
    assert_eq!(guest.read(registers::INTERRUPT_STATUS), 0);
}

#[test]
fn a_reset_stops_the_device_and_clears_its_state() {
    let mut guest = Guest::running();
    let interrupt = guest.transport.interrupt().clone();
    interrupt.used_buffers();
    interrupt.needs_reset();
    assert_eq!(guest.set_status(0), 0);
    assert!(guest.transport.device().running.is_none());
    assert_eq!(guest.read(registers::INTERRUPT_STATUS), 0);
    for index in [0, 1] {
        guest.write(registers::QUEUE_SELECT, index);
        assert_eq!(guest.read(registers::QUEUE_READY), 0);
    }
    guest.start();
    assert_eq!(guest.transport.device().activations, 2);
}

#[test]
fn a_notification_that_exits_rings_the_same_doorbell() {
    let mut guest = Guest::running();
    guest.write(QUEUE_NOTIFY, 1);
    let doorbells = guest.transport.doorbells();
    assert_eq!(doorbells.len(), 2);
    assert_eq!(doorbells[1].read().unwrap(), 1);
    assert!(doorbells[0].read().is_err());
    let activation = guest.transport.device().running.as_ref().unwrap();
    let active = activation.queues[0].as_ref().unwrap();
    guest.transport.doorbells()[0].write(1).unwrap();
    assert_eq!(active.doorbell.read().unwrap(), 1, "it is the device's own");
    for nonsense in [2, 0xffff, u32::MAX] {
        guest.write(QUEUE_NOTIFY, nonsense);
    }
}

#[test]
fn a_device_without_doorbells_is_notified_by_a_call() {
    let mut guest = Guest::new(Fake {
        inline: true,
        ..Fake::default()
    });
    assert!(guest.transport.doorbells().is_empty());
    guest.write(QUEUE_NOTIFY, 0);
    guest.start();
    guest.write(QUEUE_NOTIFY, 1);
    guest.write(QUEUE_NOTIFY, 7);
    assert_eq!(guest.transport.device().notified, [1], "only while it runs");
}

#[test]
fn interrupt_status_keeps_its_reasons_until_acknowledged() {
    let mut guest = Guest::running();
    let interrupt = guest.transport.interrupt().clone();
    let generation = guest.read(registers::CONFIG_GENERATION);
    interrupt.used_buffers();
    interrupt.used_buffers();
    assert_eq!(guest.line.read().unwrap(), 2, "each rings");
    assert_eq!(guest.read(registers::INTERRUPT_STATUS), 1);
    assert_eq!(guest.read(registers::CONFIG_GENERATION), generation);
    interrupt.config_changed();
    assert_eq!(guest.read(registers::INTERRUPT_STATUS), 3);
    assert_ne!(guest.read(registers::CONFIG_GENERATION), generation);
    guest.write(registers::INTERRUPT_ACK, 1);
    assert_eq!(guest.read(registers::INTERRUPT_STATUS), 2);
    guest.write(registers::INTERRUPT_ACK, u32::MAX);
    assert_eq!(guest.read(registers::INTERRUPT_STATUS), 0);
}

#[test]
fn the_configuration_space_accepts_any_access_width() {
    let mut guest = Guest::new(Fake::default());
    let mut byte = [0];
    guest.transport.read(0x102, &mut byte);
    assert_eq!(byte, [3]);
    let mut eight = [0xee; 8];
    guest.transport.read(0x100, &mut eight);
    assert_eq!(eight, [1, 2, 3, 4, 5, 6, 0, 0]);
    guest.transport.read(WINDOW_BYTES - 8, &mut eight);
    assert_eq!(eight, [0; 8]);
    guest.transport.write(0x101, &[9]);
    guest.set_status(1);
    guest.set_status(3);
    guest.transport.write(0x101, &[9]);
    assert_eq!(guest.transport.device().written, [(1, vec![9])]);
}

#[test]
fn registers_are_words_and_other_reads_give_zero() {
    let mut guest = Guest::new(Fake::default());
    for (offset, width) in [(0, 1), (0, 2), (0, 8), (2, 4), (1, 4), (0x70, 3)] {
        let mut data = vec![0xee; width];
        guest.transport.read(offset, &mut data);
        assert_eq!(data, vec![0; width], "{offset:#x}, {width} bytes");
        guest.transport.write(offset, &vec![1; width]);
    }
    assert_eq!(guest.status(), 0);
}

/// A paused transport whose driver and device have exchanged a few buffers.
fn saved() -> (Guest, MmioTransportState) {
    let mut guest = Guest::running();
    let activation = guest.transport.device.running.as_mut().unwrap();
    let queue = &mut activation.queues[0].as_mut().unwrap().queue;
    queue.set_next_avail(5);
    queue.set_next_used(4);
    guest.transport.interrupt().used_buffers();
    assert_eq!(guest.transport.save(), Err(NotPaused));
    guest.transport.pause();
    let state = guest.transport.save().unwrap();
    (guest, state)
}

fn restore(
    guest: &Guest,
    state: &MmioTransportState,
) -> Result<(MmioTransport<Fake>, EventFd), RestoreError> {
    let line = EventFd::new(EFD_NONBLOCK).unwrap();
    let transport = MmioTransport::restore(
        Fake::default(),
        guest.memory.clone(),
        Arc::new(ThreadWorkers),
        line.try_clone().unwrap(),
        state,
    )?;
    Ok((transport, line))
}

#[test]
fn a_restored_transport_keeps_registers_and_queue_positions() {
    let (guest, state) = saved();
    assert_eq!(state.queues[0].next_avail, 5);
    let text = serde_json::to_string(&state).unwrap();
    assert_eq!(
        serde_json::from_str::<MmioTransportState>(&text).unwrap(),
        state
    );
    let (mut transport, line) = restore(&guest, &state).unwrap();
    assert_eq!(transport.save().unwrap(), state);
    assert!(transport.device().running.is_none(), "paused at first");
    transport.resume().unwrap();
    let activation = transport.device().running.as_ref().unwrap();
    let queue = &activation.queues[0].as_ref().unwrap().queue;
    assert_eq!((queue.next_avail(), queue.next_used()), (5, 4));
    assert!(queue.event_idx_enabled());
    assert!(
        line.read().is_ok(),
        "the unacknowledged interrupt is raised again"
    );
    let mut word = [0; 4];
    transport.read(registers::STATUS, &mut word);
    assert_eq!(word, [0xf, 0, 0, 0]);
}

#[test]
fn pause_and_resume_keep_queue_positions() {
    let (mut guest, _) = saved();
    guest.transport.resume().unwrap();
    guest.transport.resume().unwrap();
    assert_eq!(guest.transport.device().activations, 2, "resumed once");
    let activation = guest.transport.device().running.as_ref().unwrap();
    assert_eq!(activation.queues[0].as_ref().unwrap().queue.next_avail(), 5);
}

#[test]
fn a_transport_is_saved_in_the_middle_of_negotiation() {
    let mut guest = Guest::new(Fake::default());
    guest.accept(registers::FEATURE_VERSION_1);
    guest.place_queue(1);
    let state = guest.transport.save().unwrap();
    let (mut transport, _) = restore(&guest, &state).unwrap();
    assert_eq!(transport.save().unwrap(), state);
    transport.resume().unwrap();
    assert!(transport.device().running.is_none());
    transport.write(registers::QUEUE_READY, &1u32.to_le_bytes());
    let mut word = [0; 4];
    transport.read(registers::QUEUE_READY, &mut word);
    assert_eq!(word, [1, 0, 0, 0]);
}

#[test]
fn a_state_that_does_not_fit_is_refused() {
    let (guest, good) = saved();
    let refused = |change: fn(&mut MmioTransportState)| {
        let mut state = good.clone();
        change(&mut state);
        restore(&guest, &state).err().unwrap()
    };
    assert!(matches!(
        refused(|state| state.device_type = 1),
        RestoreError::DeviceType { .. }
    ));
    assert!(matches!(
        refused(|state| state.queues.truncate(1)),
        RestoreError::QueueCount { .. }
    ));
    assert!(matches!(
        refused(|state| state.driver_features |= 1 << 50),
        RestoreError::Features(_)
    ));
    assert!(matches!(
        refused(|state| state.status = 4),
        RestoreError::Status(4)
    ));
    // Queues are checked when the device starts.
    for change in [
        (|state| state.queues[0].size = 7) as fn(&mut MmioTransportState),
        |state| state.queues[0].descriptors = 1 << 40,
        |state| state.queues[0].device_ring = u64::MAX - 3,
    ] {
        let mut state = good.clone();
        change(&mut state);
        let (mut transport, _) = restore(&guest, &state).unwrap();
        assert!(transport.resume().is_err());
        assert!(transport.device().running.is_none());
    }
}

proptest! {
    #[test]
    fn no_sequence_of_accesses_breaks_the_status_rules(
        accesses in proptest::collection::vec(
            (any::<bool>(), prop_oneof![0u64..0x40, Just(0x40)].prop_map(|word| word * 4),
             prop_oneof![proptest::sample::select(ALL_STEPS.to_vec()), 0u32..16, (1u32..0x10).prop_map(|n| n << 12), any::<u32>()]),
            0..300),
        start in any::<bool>(),
    ) {
        let mut guest = Guest::new(Fake::default());
        if start {
            guest.start();
        }
        for (is_write, offset, value) in accesses {
            if is_write {
                guest.write(offset, value);
            } else {
                guest.read(offset);
            }
            let status = guest.status();
            let running = guest.transport.device().running.as_ref();
            // A device runs if and only if the driver has finished and the device has not failed.
            let should = status & status::DRIVER_OK != 0 && status & status::NEEDS_RESET == 0;
            prop_assert_eq!(running.is_some(), should);
            if let Some(activation) = running {
                prop_assert_eq!(activation.features & !(OFFERED | registers::FEATURE_VERSION_1), 0);
                for active in activation.queues.iter().flatten() {
                    prop_assert!(active.queue.is_valid(guest.memory.as_ref()));
                }
            }
        }
    }
}
