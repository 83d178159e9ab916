//! Handling a vCPU's exits from the guest.

use crate::ending::Ending;
use crate::irq::LazyPit;
use jiffy_devices::bus::Bus;
use jiffy_devices::power::PowerSwitch;
use jiffy_sys::activity;
use jiffy_wire::vmm::ExitReason;
use kvm_ioctls::{VcpuExit, VcpuFd};
use std::sync::Arc;

const SYSTEM_EVENT_SHUTDOWN: u32 = 1;
const SYSTEM_EVENT_RESET: u32 = 2;
const SYSTEM_EVENT_CRASH: u32 = 3;

/// The buses and devices that handle a vCPU's exits.
#[derive(Clone)]
pub struct Board {
    /// Port I/O.
    pub ports: Arc<Bus>,
    /// Memory-mapped I/O.
    pub mmio: Arc<Bus>,
    /// The timer chip, created when a guest uses it.
    pub pit: Arc<LazyPit>,
    /// Set once the guest has asked for a reset or power off.
    pub power: Arc<PowerSwitch>,
}

/// What to do after an exit.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Enter the guest again.
    Run,
    /// Check for requests: a signal came, or the guest reset or powered off.
    CheckRequests,
    /// This vCPU can't continue; the VM ends.
    End(Ending),
}

fn end(reason: ExitReason, message: impl Into<String>) -> Next {
    Next::End(Ending {
        reason,
        message: message.into(),
    })
}

/// Runs the guest until its next exit, and handles the exit.
pub fn step(fd: &mut VcpuFd, board: &Board) -> Next {
    let exit = fd.run();
    let begun = activity::begin();
    let (reason, next) = match exit {
        Ok(VcpuExit::MmioRead(address, data)) => {
            board.mmio.read(address, data);
            ("exit: MMIO read", Next::Run)
        }
        Ok(VcpuExit::MmioWrite(address, data)) => {
            board.mmio.write(address, data);
            ("exit: MMIO write", Next::Run)
        }
        Ok(VcpuExit::IoIn(port, data)) => {
            let data = std::ptr::from_mut(data);
            ("exit: port read", port_read(fd, board, port, data))
        }
        Ok(VcpuExit::IoOut(port, data)) => {
            let data = std::ptr::from_ref(data);
            ("exit: port write", port_write(fd, board, port, data))
        }
        Ok(other) => ("exit: other", end_of(&other)),
        Err(error) => match error.errno() {
            libc::EINTR | libc::EAGAIN => ("exit: signal", Next::CheckRequests),
            errno => ("exit: error", failed(errno)),
        },
    };
    activity::end(begun, reason);
    next
}

/// Lets KVM complete the last exit without entering the guest. An access that KVM splits
/// (over eight bytes, across pages, `rep movs`) exits once more for each part, and a part
/// that is not handled would be completed with stale data.
pub fn complete(fd: &mut VcpuFd, board: &Board) -> Next {
    fd.set_kvm_immediate_exit(1);
    // With the flag set KVM finishes, and then returns EINTR.
    loop {
        match step(fd, board) {
            Next::Run => {}
            next => return next,
        }
    }
}

/// Bytes of each access of the current port I/O exit.
#[allow(unsafe_code)] // The width lies in kvm_run.
fn port_width(fd: &mut VcpuFd) -> usize {
    // SAFETY: after KVM_EXIT_IO this is the active member of the union.
    usize::from(unsafe { fd.get_kvm_run().__bindgen_anon_1.io.size }).max(1)
}

/// One read, or a string of them (`rep ins`), of one port.
#[allow(unsafe_code)] // The exit's data lies in kvm_run.
fn port_read(fd: &mut VcpuFd, board: &Board, port: u16, data: *mut [u8]) -> Next {
    let width = port_width(fd);
    // SAFETY: the pointer comes from a mutable reference into the vCPU's kvm_run mapping, outside
    // the structure; KVM accesses it only inside KVM_RUN, which is not called while it is borrowed
    // here.
    let data = unsafe { &mut *data };
    if LazyPit::has(port) {
        for byte in data.chunks_mut(width) {
            byte.fill(board.pit.read(port));
        }
    } else {
        board.ports.read_each(port.into(), width, data);
    }
    Next::Run
}

/// One write, or a string of them (`rep outs`), to one port.
#[allow(unsafe_code)] // The exit's data lies in kvm_run.
fn port_write(fd: &mut VcpuFd, board: &Board, port: u16, data: *const [u8]) -> Next {
    let width = port_width(fd);
    // SAFETY: as in `port_read`; it is only read.
    let data = unsafe { &*data };
    if LazyPit::has(port) {
        for bytes in data.chunks(width) {
            board.pit.write(port, bytes[0]);
        }
        return Next::Run;
    }
    board.ports.write_each(port.into(), width, data);
    match board.power.request() {
        Some(_) => Next::CheckRequests,
        None => Next::Run,
    }
}

fn end_of(exit: &VcpuExit<'_>) -> Next {
    use ExitReason::{GuestFault, HostError, Shutdown};
    match exit {
        VcpuExit::Intr | VcpuExit::IrqWindowOpen => Next::CheckRequests,
        VcpuExit::SystemEvent(SYSTEM_EVENT_SHUTDOWN, _) => end(Shutdown, "the guest powered off"),
        VcpuExit::SystemEvent(SYSTEM_EVENT_RESET, _) => end(Shutdown, "the guest reset"),
        VcpuExit::SystemEvent(SYSTEM_EVENT_CRASH, _) => {
            end(GuestFault, "the guest reported that it crashed")
        }
        VcpuExit::Shutdown => end(GuestFault, "the guest crashed: triple fault"),
        VcpuExit::InternalError => end(
            GuestFault,
            "KVM could not execute or emulate what the guest did",
        ),
        VcpuExit::FailEntry(reason, _) => end(
            GuestFault,
            format!("the processor refused the guest's state (reason {reason:#x})"),
        ),
        VcpuExit::MemoryFault { gpa, .. } => end(
            HostError,
            format!("the host could not provide guest memory at {gpa:#x}"),
        ),
        other => end(HostError, format!("KVM returned unexpectedly: {other:?}")),
    }
}

fn failed(errno: i32) -> Next {
    let message = match errno {
        libc::EFAULT => "the host could not provide memory the guest touched".to_owned(),
        libc::ENOMEM => "the host ran out of memory".to_owned(),
        other => format!(
            "KVM failed to run a vCPU: {}",
            std::io::Error::from_raw_os_error(other)
        ),
    };
    end(ExitReason::HostError, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hypervisor::Hypervisor;
    use crate::memory::GuestRam;
    use jiffy_devices::bus::BusDevice;
    use jiffy_wire::vmm::{Memory, PageSize};
    use std::sync::Mutex;
    use vm_memory::{Bytes, GuestAddress};

    const CODE: u64 = 0x1000;
    const BUFFER: u64 = 0x2000;
    const DEVICE: u64 = 0xd000_0000;

    /// Returns how often it was read.
    struct Counter(u8);

    impl BusDevice for Counter {
        fn read(&mut self, _offset: u64, data: &mut [u8]) {
            self.0 += 1;
            data.fill(self.0);
        }
        fn write(&mut self, _offset: u64, _data: &[u8]) {}
    }

    #[test]
    #[ignore = "needs a real KVM"]
    fn pending_mmio_is_completed_before_a_vcpu_stops() {
        let ram = GuestRam::create(&Memory {
            size_mib: 64,
            pages: PageSize::Small,
            prefault: false,
        })
        .unwrap();
        let vm = Arc::new(Hypervisor::open().unwrap().create_vm().unwrap());
        ram.register(&vm).unwrap();
        // rep movsb; hlt
        let code = [0xf3, 0xa4, 0xf4];
        ram.memory().write_slice(&code, GuestAddress(CODE)).unwrap();
        let mut mmio = Bus::new();
        let device = Arc::new(Mutex::new(Counter(0)));
        mmio.insert(DEVICE, 4096, device).unwrap();
        let board = Board {
            ports: Arc::default(),
            mmio: Arc::new(mmio),
            pit: Arc::new(LazyPit::new(vm.clone())),
            power: Arc::new(PowerSwitch::new().unwrap()),
        };
        // Real mode, as after reset, except for the bases.
        let mut fd = vm.create_vcpu(0).unwrap();
        let mut sregs = fd.get_sregs().unwrap();
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        sregs.ds.base = DEVICE;
        fd.set_sregs(&sregs).unwrap();
        let mut regs = fd.get_regs().unwrap();
        (regs.rip, regs.rflags) = (CODE, 2);
        (regs.rsi, regs.rdi, regs.rcx) = (0, BUFFER, 5);
        fd.set_regs(&regs).unwrap();

        assert_eq!(step(&mut fd, &board), Next::Run);
        assert_eq!(complete(&mut fd, &board), Next::CheckRequests);
        assert_eq!(fd.get_regs().unwrap().rcx, 0);
        let mut copied = [0; 6];
        let at = GuestAddress(BUFFER);
        ram.memory().read_slice(&mut copied, at).unwrap();
        assert_eq!(copied, [1, 2, 3, 4, 5, 0]);
    }
}
