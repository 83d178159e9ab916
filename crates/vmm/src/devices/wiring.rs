//! Connects devices with KVM: MMIO windows, ports, interrupts (irqfd) and doorbells (ioeventfd).

use super::error::DeviceError;
use super::read_notes::ReadNotes;
use super::{DeviceArgs, Shared, shared};
use crate::hypervisor::failed_to;
use crate::layout;
use jiffy_devices::bus::{Bus, BusDevice};
use jiffy_devices::power::PowerSwitch;
use jiffy_devices::virtio::device::VirtioDevice;
use jiffy_devices::virtio::mmio::registers::QUEUE_NOTIFY;
use jiffy_devices::virtio::mmio::{MmioTransport, MmioTransportState, Wires};
use kvm_ioctls::{IoEventAddress, VmFd};
use std::cell::OnceCell;
use std::fmt::Write as _;
use std::io;
use std::sync::Arc;
use std::vec;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Doorbells of the first windows of a usual VM: those of its disk, of vsock, and of two devices
/// without any.
const USUAL_DOORBELLS: [usize; 4] = [1, 3, 0, 0];

/// Connects interrupts and doorbells of the first windows before it is known which devices
/// there are. This saves time later: for each doorbell KVM waits until no vCPU uses its bus
/// (SRCU).
///
/// # Errors
///
/// If KVM refuses a connection, or an event descriptor can't be made.
pub fn ahead(vm: &VmFd) -> Result<Vec<Wires>, DeviceError> {
    let wires = |(number, count)| {
        let doorbells = (0..count)
            .map(|_| EventFd::new(EFD_NONBLOCK))
            .collect::<io::Result<Vec<_>>>()
            .map_err(DeviceError::Event)?;
        let slot = Slot::new(number);
        for (queue, doorbell) in (0..).zip(&doorbells) {
            slot.connect(vm, queue, doorbell)?;
        }
        let line = interrupt(vm, slot.irq)?;
        Ok(Wires { line, doorbells })
    };
    USUAL_DOORBELLS.into_iter().enumerate().map(wires).collect()
}

/// The window and interrupt of a virtio device.
#[derive(Debug, Clone, Copy)]
struct Slot {
    window: u64,
    irq: u32,
}

impl Slot {
    fn new(number: usize) -> Slot {
        Slot {
            window: layout::MMIO_START + number as u64 * layout::MMIO_SIZE,
            irq: layout::VIRTIO_IRQS[number % layout::VIRTIO_IRQS.len()],
        }
    }

    fn notify(self) -> IoEventAddress {
        IoEventAddress::Mmio(self.window + QUEUE_NOTIFY)
    }

    fn connect(self, vm: &VmFd, queue: u32, doorbell: &EventFd) -> Result<(), DeviceError> {
        vm.register_ioevent(doorbell, &self.notify(), queue)
            .map_err(failed_to("connect a device's doorbell"))?;
        Ok(())
    }

    fn disconnect(self, vm: &VmFd, queue: u32, doorbell: &EventFd) -> Result<(), DeviceError> {
        vm.unregister_ioevent(doorbell, &self.notify(), queue)
            .map_err(failed_to("disconnect a doorbell"))?;
        Ok(())
    }
}

/// The buses that are being filled, and the next free window and interrupt.
pub struct Wiring<'a> {
    /// What is needed to create devices.
    pub args: &'a DeviceArgs<'a>,
    /// Set by a device when the guest resets or powers off.
    pub power: Arc<PowerSwitch>,
    /// The noted reads of a disk, if its configuration asks for that.
    pub reads: OnceCell<Arc<ReadNotes>>,
    /// Descriptors that were created ahead, for the first windows.
    wires: vec::IntoIter<Wires>,
    /// I/O ports with their devices.
    pub ports: Bus,
    /// Memory-mapped registers with their devices.
    pub mmio: Bus,
    /// A `virtio_mmio.device=` parameter for each virtio device.
    pub parameters: String,
    count: usize,
}

impl<'a> Wiring<'a> {
    /// Empty buses, with the descriptors that were created ahead.
    pub fn new(args: &'a DeviceArgs<'a>, power: Arc<PowerSwitch>, wires: Vec<Wires>) -> Wiring<'a> {
        Wiring {
            args,
            power,
            reads: OnceCell::new(),
            wires: wires.into_iter(),
            ports: Bus::new(),
            mmio: Bus::new(),
            parameters: String::new(),
            count: 0,
        }
    }

    /// Gives a virtio device its window, interrupt and doorbells.
    ///
    /// # Errors
    ///
    /// If an event descriptor can't be created, KVM refuses the interrupt or a doorbell, the state
    /// is not valid, or the window is in use.
    pub fn add_virtio<D: VirtioDevice + 'static>(
        &mut self,
        device: D,
        state: Option<&MmioTransportState>,
    ) -> Result<Shared<MmioTransport<D>>, DeviceError> {
        let args = self.args;
        let slot = Slot::new(self.count);
        self.count += 1;

        let mut wires = match self.wires.next() {
            Some(wires) => wires,
            None => interrupt(args.vm, slot.irq)?.into(),
        };
        if !device.waits_on_doorbells() {
            for (queue, doorbell) in (0..).zip(wires.doorbells.drain(..)) {
                slot.disconnect(args.vm, queue, &doorbell)?;
            }
        }
        let connected = wires.doorbells.len();
        let (memory, workers) = (args.ram.memory().clone(), args.workers.clone());
        let transport = match state {
            None => {
                MmioTransport::new(device, memory, workers, wires).map_err(DeviceError::Event)?
            }
            Some(state) => MmioTransport::restore(device, memory, workers, wires, state)?,
        };
        for (queue, doorbell) in (0..).zip(transport.doorbells()).skip(connected) {
            slot.connect(args.vm, queue, doorbell)?;
        }
        let transport = shared(transport);
        self.mmio
            .insert(slot.window, layout::MMIO_SIZE, transport.clone())?;
        let separator = if self.parameters.is_empty() { "" } else { " " };
        write!(
            self.parameters,
            "{separator}virtio_mmio.device=4K@{:#x}:{}",
            slot.window, slot.irq
        )
        .expect("writing to a string");
        Ok(transport)
    }

    /// Puts a device at `count` I/O ports from `first` on.
    ///
    /// # Errors
    ///
    /// If one of the ports is in use.
    pub fn add_ports(
        &mut self,
        first: u64,
        count: u64,
        device: Shared<dyn BusDevice>,
    ) -> Result<(), DeviceError> {
        Ok(self.ports.insert(first, count, device)?)
    }

    /// A descriptor that raises an edge on an interrupt line (GSI).
    ///
    /// # Errors
    ///
    /// If the descriptor can't be created, or `KVM_IRQFD` fails.
    pub fn interrupt(&self, irq: u32) -> Result<EventFd, DeviceError> {
        interrupt(self.args.vm, irq)
    }
}

/// A descriptor that raises an edge on an interrupt line.
fn interrupt(vm: &VmFd, irq: u32) -> Result<EventFd, DeviceError> {
    let line = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(DeviceError::Event)?;
    vm.register_irqfd(&line, irq)
        .map_err(failed_to("connect a device's interrupt"))?;
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::Devices;
    use crate::events::Events;
    use crate::hypervisor::Hypervisor;
    use crate::mailbox::Mailbox;
    use crate::memory::GuestRam;
    use crate::sandbox::Sandbox;
    use crate::workers::{IdleThreads, ThreadStarter};
    use jiffy_devices::virtio::device::Workers;
    use jiffy_wire::vmm::VmmConfig;

    #[test]
    #[ignore = "needs a real KVM"]
    fn unexpected_devices_get_no_doorbell_prepared_for_others() {
        let folder = tempfile::tempdir().unwrap();
        // vsock has the window that was prepared for a disk, and entropy that of vsock.
        let config: VmmConfig = serde_json::from_value(serde_json::json!({
            "version": jiffy_wire::vmm::VERSION,
            "id": "wires",
            "vcpus": 1,
            "memory": { "size_mib": 64 },
            "boot": { "kernel": "/kernel", "command_line": "" },
            "vsock": { "cid": 3, "path": folder.path().join("vsock") },
            "rng": true,
        }))
        .unwrap();
        let vm = Arc::new(Hypervisor::open().unwrap().create_vm().unwrap());
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let workers: Arc<dyn Workers> = Arc::new(ThreadStarter::new(
            mailbox.clone(),
            Sandbox::Off,
            IdleThreads::default(),
        ));
        let args = DeviceArgs {
            config: &config,
            vm: &vm,
            ram: &Arc::new(GuestRam::create(&config.memory).unwrap()),
            mailbox: &mailbox,
            workers: &workers,
            events: &Arc::new(Events::new(None).unwrap()),
        };
        let devices = Devices::create(&args, ahead(&vm).unwrap(), None).unwrap();
        let windows = "virtio_mmio.device=4K@0xd0000000:5 virtio_mmio.device=4K@0xd0001000:6";
        assert_eq!(devices.parameters, windows);

        let probe = EventFd::new(EFD_NONBLOCK).unwrap();
        let is_free = |slot, queue| Slot::new(slot).connect(&vm, queue, &probe).is_ok();
        let connected: Vec<bool> = (0..3).map(|queue| !is_free(0, queue)).collect();
        assert_eq!(connected, [true; 3]);
        let connected: Vec<bool> = (0..3).map(|queue| !is_free(1, queue)).collect();
        assert_eq!(connected, [false; 3]);
    }
}
