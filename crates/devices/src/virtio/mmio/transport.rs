//! The state machine between a driver and its device (Virtio 1.3 §3.1, §4.2).

use super::interrupt::MmioInterrupt;
use super::queue::QueueRegisters;
use super::registers::{self as reg, status};
use super::state::{MmioTransportState, RestoreError};
use crate::GuestMemory;
use crate::bus::BusDevice;
use crate::virtio::device::{
    ActivateError, Activation, ActiveQueue, Interrupt, VirtioDevice, Workers,
};
use jiffy_sys::log_limit::LogLimit;
use std::io;
use std::sync::Arc;
use thiserror::Error;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// A virtio device at a window of [`super::WINDOW_BYTES`] in guest physical memory.
///
/// A guest's writes are either recorded, and checked when they are used, or ignored with a debug
/// message. No write makes the transport fail.
pub struct MmioTransport<D: VirtioDevice> {
    pub(super) device: D,
    memory: Arc<GuestMemory>,
    workers: Arc<dyn Workers>,
    interrupt: Arc<MmioInterrupt>,
    doorbells: Vec<EventFd>,
    status: u32,
    device_features_select: u32,
    driver_features_select: u32,
    driver_features: u64,
    queue_select: u32,
    queues: Vec<QueueRegisters>,
    running: bool,
    log: LogLimit,
}

/// The event descriptors between a transport and its driver.
#[derive(Debug)]
pub struct Wires {
    /// The device's interrupt: an irqfd without resampling (edge).
    pub line: EventFd,
    /// Notifications of the driver (ioeventfds), one per queue, by index. The transport creates
    /// missing ones.
    pub doorbells: Vec<EventFd>,
}

impl From<EventFd> for Wires {
    fn from(line: EventFd) -> Wires {
        Wires {
            line,
            doorbells: Vec::new(),
        }
    }
}

/// A transport can only be saved while its device is paused.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("a virtio device must be paused before it can be saved")]
pub struct NotPaused;

impl<D: VirtioDevice> MmioTransport<D> {
    /// A transport after reset.
    ///
    /// # Errors
    ///
    /// If an event descriptor can't be created.
    pub fn new(
        device: D,
        memory: Arc<GuestMemory>,
        workers: Arc<dyn Workers>,
        wires: impl Into<Wires>,
    ) -> io::Result<MmioTransport<D>> {
        let queues: Vec<QueueRegisters> = device
            .queue_max_sizes()
            .iter()
            .map(|max_size| QueueRegisters::new(*max_size))
            .collect();
        let Wires {
            line,
            mut doorbells,
        } = wires.into();
        doorbells.truncate(queues.len());
        while doorbells.len() < queues.len() {
            doorbells.push(EventFd::new(EFD_NONBLOCK)?);
        }
        Ok(MmioTransport {
            device,
            memory,
            workers,
            interrupt: Arc::new(MmioInterrupt::new(line)),
            doorbells,
            status: 0,
            device_features_select: 0,
            driver_features_select: 0,
            driver_features: 0,
            queue_select: 0,
            queues,
            running: false,
            log: LogLimit::new(),
        })
    }

    /// Restores a saved transport, paused; [`resume`](Self::resume) starts it. The state is not
    /// trusted: queues are checked again on resume, the rest here.
    ///
    /// # Errors
    ///
    /// If the device has another type or number of queues than the saved one, if the driver relies
    /// on features that are not offered or could not have reached the status, or if an event
    /// descriptor can't be created.
    pub fn restore(
        device: D,
        memory: Arc<GuestMemory>,
        workers: Arc<dyn Workers>,
        wires: impl Into<Wires>,
        state: &MmioTransportState,
    ) -> Result<MmioTransport<D>, RestoreError> {
        let actual = device.device_type();
        if state.device_type != actual {
            let saved = state.device_type;
            return Err(RestoreError::DeviceType { saved, actual });
        }
        let actual = device.queue_max_sizes().len();
        if state.queues.len() != actual {
            let saved = state.queues.len();
            return Err(RestoreError::QueueCount { saved, actual });
        }
        let agreed = state.status & status::FEATURES_OK != 0;
        let unknown = state.driver_features & !offered_features(&device);
        if agreed && unknown != 0 {
            return Err(RestoreError::Features(unknown));
        }
        if !is_valid_status(state.status) {
            return Err(RestoreError::Status(state.status));
        }

        let mut transport =
            MmioTransport::new(device, memory, workers, wires).map_err(RestoreError::Event)?;
        let line = transport
            .interrupt
            .line()
            .try_clone()
            .map_err(RestoreError::Event)?;
        transport.interrupt = Arc::new(MmioInterrupt::with(
            line,
            state.interrupt_status,
            state.config_generation,
            state.needs_reset,
        ));
        transport.status = state.status;
        transport.device_features_select = state.device_features_select;
        transport.driver_features_select = state.driver_features_select;
        transport.driver_features = state.driver_features;
        transport.queue_select = state.queue_select;
        for (queue, saved) in transport.queues.iter_mut().zip(&state.queues) {
            *queue = QueueRegisters::restore(queue.max_size, saved);
        }
        Ok(transport)
    }

    /// The device behind the transport.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The device, mutable, for the host's changes.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// The descriptors to register as ioeventfds: a four-byte write of `i` to `QUEUE_NOTIFY` in the
    /// window must signal the `i`th. Empty for a device that works on the notifying vCPU: register
    /// none for it.
    pub fn doorbells(&self) -> &[EventFd] {
        if self.device.waits_on_doorbells() {
            &self.doorbells
        } else {
            &[]
        }
    }

    /// The device's interrupt.
    pub fn interrupt(&self) -> &Arc<MmioInterrupt> {
        &self.interrupt
    }

    /// Stops the device and stores its queues' positions. Call it with all vCPUs stopped. Requests
    /// in progress are finished first; waiting requests stay in their rings.
    pub fn pause(&mut self) {
        if !self.running {
            return;
        }
        self.running = false;
        for active in self.device.deactivate() {
            if let Some(queue) = self.queues.get_mut(usize::from(active.index)) {
                queue.keep_position(&active.queue);
            }
        }
    }

    /// Resumes a paused device. Does nothing if its driver had not started it.
    ///
    /// # Errors
    ///
    /// If a queue is not valid, or as of [`VirtioDevice::activate`]. The driver sees
    /// DEVICE_NEEDS_RESET then.
    pub fn resume(&mut self) -> Result<(), ActivateError> {
        if self.running || self.status & status::DRIVER_OK == 0 || self.interrupt.failed() {
            return Ok(());
        }
        let was_pending = self.interrupt.is_pending();
        self.activate()?;
        if was_pending {
            self.interrupt.repeat();
        }
        Ok(())
    }

    /// The transport's state; the device must be paused or never started.
    ///
    /// # Errors
    ///
    /// [`NotPaused`] if the device runs.
    pub fn save(&self) -> Result<MmioTransportState, NotPaused> {
        if self.running {
            return Err(NotPaused);
        }
        Ok(MmioTransportState {
            device_type: self.device.device_type(),
            status: self.status,
            device_features_select: self.device_features_select,
            driver_features_select: self.driver_features_select,
            driver_features: self.driver_features,
            queue_select: self.queue_select,
            queues: self.queues.iter().map(QueueRegisters::save).collect(),
            interrupt_status: self.interrupt.status(),
            config_generation: self.interrupt.generation(),
            needs_reset: self.interrupt.failed(),
        })
    }

    fn activate(&mut self) -> Result<(), ActivateError> {
        let result = self.try_activate();
        match &result {
            Ok(()) => self.running = true,
            Err(error) => {
                if self.log.admits() {
                    tracing::warn!(
                        device_type = self.device.device_type(),
                        error = error as &dyn std::error::Error,
                        "a virtio device could not start"
                    );
                }
                self.interrupt.needs_reset();
            }
        }
        result
    }

    fn try_activate(&mut self) -> Result<(), ActivateError> {
        let event_idx = self.driver_features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0;
        let mut queues = Vec::with_capacity(self.queues.len());
        for (index, (registers, doorbell)) in (0u16..).zip(self.queues.iter().zip(&self.doorbells))
        {
            if !registers.ready {
                queues.push(None);
                continue;
            }
            queues.push(Some(ActiveQueue {
                index,
                queue: registers
                    .build(&self.memory, event_idx)
                    .ok_or(ActivateError::InvalidQueue(index))?,
                doorbell: doorbell.try_clone().map_err(ActivateError::Worker)?,
            }));
        }
        self.device.activate(Activation {
            memory: self.memory.clone(),
            queues,
            interrupt: self.interrupt.clone(),
            features: self.driver_features,
            workers: self.workers.clone(),
        })
    }

    fn reset(&mut self) {
        if self.running {
            self.running = false;
            self.device.deactivate();
        }
        self.device.reset();
        self.status = 0;
        self.device_features_select = 0;
        self.driver_features_select = 0;
        self.driver_features = 0;
        self.queue_select = 0;
        for queue in &mut self.queues {
            *queue = QueueRegisters::new(queue.max_size);
        }
        self.interrupt.reset();
    }

    fn set_status(&mut self, value: u32) {
        if value == 0 {
            return self.reset();
        }
        // The driver may write NEEDS_RESET back as it read it.
        let value = value & !status::NEEDS_RESET;
        if value & self.status != self.status || !is_valid_status(value) {
            tracing::debug!(from = self.status, to = value, "impossible virtio status");
            return;
        }
        let gained = value & !self.status;
        if gained & status::FEATURES_OK != 0 && !self.features_agree() {
            // FEATURES_OK stays clear, by which the driver notices the refusal.
            self.status = value & !(status::FEATURES_OK | status::DRIVER_OK);
            return;
        }
        self.status = value;
        if gained & status::DRIVER_OK != 0 && !self.interrupt.failed() {
            // DEVICE_NEEDS_RESET reports a failure to the driver.
            let _ = self.activate();
        }
    }

    fn features_agree(&self) -> bool {
        self.driver_features & !offered_features(&self.device) == 0
            && self.driver_features & reg::FEATURE_VERSION_1 != 0
    }

    fn queue(&self) -> Option<&QueueRegisters> {
        self.queues.get(self.queue_select as usize)
    }

    /// The selected queue, if the driver may set it up now: after features are negotiated and
    /// before DRIVER_OK.
    fn queue_to_set_up(&mut self) -> Option<&mut QueueRegisters> {
        if self.status & (status::FEATURES_OK | status::DRIVER_OK | status::FAILED)
            != status::FEATURES_OK
        {
            tracing::debug!(
                status = self.status,
                "ignored a write to a queue register before FEATURES_OK or after DRIVER_OK"
            );
            return None;
        }
        self.queues.get_mut(self.queue_select as usize)
    }

    /// The selected queue, if it may be set up now and is not ready: addresses and size of a ready
    /// queue can't be changed.
    fn queue_not_ready(&mut self) -> Option<&mut QueueRegisters> {
        self.queue_to_set_up().filter(|queue| !queue.ready)
    }

    fn set_queue_ready(&mut self, value: u32) {
        let memory = self.memory.clone();
        if let Some(queue) = self.queue_to_set_up() {
            // An invalid queue stays not ready, which the driver can read, and a device that needs
            // it does not start.
            queue.ready = value == 1 && queue.build(&memory, false).is_some();
        }
    }

    fn notify(&mut self, index: u32) {
        let Some(doorbell) = self.doorbells.get(index as usize) else {
            return;
        };
        if !self.running {
            return;
        }
        if !self.device.waits_on_doorbells() {
            self.device.notified(index as u16);
        } else if let Err(error) = doorbell.write(1) {
            tracing::debug!(%error, "a doorbell could not be rung");
        }
    }

    fn read_register(&self, offset: u64) -> u32 {
        match offset {
            reg::MAGIC_VALUE => reg::MAGIC,
            reg::VERSION_NUMBER => reg::VERSION,
            reg::DEVICE_ID => self.device.device_type(),
            reg::VENDOR_ID => reg::VENDOR,
            reg::DEVICE_FEATURES => match self.device_features_select {
                0 => offered_features(&self.device) as u32,
                1 => (offered_features(&self.device) >> 32) as u32,
                _ => 0,
            },
            reg::QUEUE_SIZE_MAX => self.queue().map_or(0, |queue| u32::from(queue.max_size)),
            reg::QUEUE_READY => self.queue().map_or(0, |queue| u32::from(queue.ready)),
            reg::INTERRUPT_STATUS => self.interrupt.status(),
            reg::STATUS if self.interrupt.failed() => self.status | status::NEEDS_RESET,
            reg::STATUS => self.status,
            // There are no shared memory regions: all ones (§4.2.2).
            reg::SHM_LENGTH_LOW | reg::SHM_LENGTH_HIGH | reg::SHM_BASE_LOW | reg::SHM_BASE_HIGH => {
                u32::MAX
            }
            reg::CONFIG_GENERATION => self.interrupt.generation(),
            _ => 0,
        }
    }

    fn write_register(&mut self, offset: u64, value: u32) {
        match offset {
            reg::DEVICE_FEATURES_SELECT => self.device_features_select = value,
            reg::DRIVER_FEATURES_SELECT => self.driver_features_select = value,
            reg::DRIVER_FEATURES => self.set_driver_features(value),
            reg::QUEUE_SELECT => self.queue_select = value,
            reg::QUEUE_READY => self.set_queue_ready(value),
            reg::QUEUE_NOTIFY => self.notify(value),
            reg::INTERRUPT_ACK => self.interrupt.acknowledge(value),
            reg::STATUS => self.set_status(value),
            _ => {
                let Some(queue) = self.queue_not_ready() else {
                    return;
                };
                match offset {
                    reg::QUEUE_SIZE => queue.size = value,
                    reg::QUEUE_DESC_LOW => set_low(&mut queue.descriptors, value),
                    reg::QUEUE_DESC_HIGH => set_high(&mut queue.descriptors, value),
                    reg::QUEUE_DRIVER_LOW => set_low(&mut queue.driver_ring, value),
                    reg::QUEUE_DRIVER_HIGH => set_high(&mut queue.driver_ring, value),
                    reg::QUEUE_DEVICE_LOW => set_low(&mut queue.device_ring, value),
                    reg::QUEUE_DEVICE_HIGH => set_high(&mut queue.device_ring, value),
                    _ => tracing::debug!(offset, value, "write to no virtio register"),
                }
            }
        }
    }

    fn set_driver_features(&mut self, value: u32) {
        if self.status & status::FEATURES_OK != 0 {
            return;
        }
        match self.driver_features_select {
            0 => set_low(&mut self.driver_features, value),
            1 => set_high(&mut self.driver_features, value),
            _ => {}
        }
    }
}

impl<D: VirtioDevice> BusDevice for MmioTransport<D> {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        if offset >= reg::CONFIG {
            return self.device.read_config(offset - reg::CONFIG, data);
        }
        match <&mut [u8; 4]>::try_from(&mut *data) {
            // Registers are 32 bits wide and aligned (§4.2.2).
            Ok(word) if offset.is_multiple_of(4) => {
                *word = self.read_register(offset).to_le_bytes()
            }
            _ => data.fill(0),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if offset >= reg::CONFIG {
            if self.status & status::DRIVER != 0 {
                self.device.write_config(offset - reg::CONFIG, data);
            }
            return;
        }
        if let (Ok(word), 0) = (<[u8; 4]>::try_from(data), offset % 4) {
            self.write_register(offset, u32::from_le_bytes(word));
        }
    }
}

impl<D: VirtioDevice> Drop for MmioTransport<D> {
    fn drop(&mut self) {
        if self.running {
            self.device.deactivate();
        }
    }
}

fn offered_features(device: &impl VirtioDevice) -> u64 {
    device.features() | reg::FEATURE_VERSION_1
}

/// Whether these bits, without NEEDS_RESET, can be set together: each step of §3.1.1 requires those
/// before it, and FAILED may come at any time.
fn is_valid_status(bits: u32) -> bool {
    use status::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FAILED, FEATURES_OK};
    let steps = [
        0,
        ACKNOWLEDGE,
        ACKNOWLEDGE | DRIVER,
        ACKNOWLEDGE | DRIVER | FEATURES_OK,
        ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK,
    ];
    steps.contains(&(bits & !FAILED))
}

fn set_low(target: &mut u64, value: u32) {
    *target = *target & !0xffff_ffff | u64::from(value);
}

fn set_high(target: &mut u64, value: u32) {
    *target = *target & 0xffff_ffff | u64::from(value) << 32;
}
