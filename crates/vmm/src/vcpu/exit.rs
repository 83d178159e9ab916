//! What makes a vCPU leave the guest, answered.

use crate::irq::LazyPit;
use jiffy_devices::bus::Bus;
use jiffy_devices::power::PowerSwitch;
use jiffy_wire::vmm::ExitReason;
use kvm_ioctls::{VcpuExit, VcpuFd};
use std::sync::Arc;

const SYSTEM_EVENT_SHUTDOWN: u32 = 1;
const SYSTEM_EVENT_RESET: u32 = 2;
const SYSTEM_EVENT_CRASH: u32 = 3;

/// What a vCPU needs to answer the guest.
#[derive(Clone)]
pub struct Board {
    /// Port I/O.
    pub ports: Arc<Bus>,
    /// Memory-mapped I/O.
    pub mmio: Arc<Bus>,
    /// The timer chip, made when a guest wants one.
    pub pit: Arc<LazyPit>,
    /// Set once the guest has asked for the end.
    pub power: Arc<PowerSwitch>,
}

/// What comes after one stay in the guest.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Go in again.
    Run,
    /// Look at requests: a signal came, or the guest asked for the end.
    Look,
    /// This vCPU can't go on; the VM ends.
    End(Ending),
}

/// Why a VM can't go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ending {
    /// What kind.
    pub reason: ExitReason,
    /// One sentence.
    pub message: String,
}

fn end(reason: ExitReason, message: impl Into<String>) -> Next {
    Next::End(Ending {
        reason,
        message: message.into(),
    })
}

/// Runs the guest until it leaves, and answers it.
pub fn step(fd: &mut VcpuFd, board: &Board) -> Next {
    match fd.run() {
        Ok(VcpuExit::MmioRead(address, data)) => {
            board.mmio.read(address, data);
            Next::Run
        }
        Ok(VcpuExit::MmioWrite(address, data)) => {
            board.mmio.write(address, data);
            Next::Run
        }
        Ok(VcpuExit::IoIn(port, data)) => {
            let data: *mut [u8] = data;
            port_access(fd, board, port, data, true)
        }
        Ok(VcpuExit::IoOut(port, data)) => {
            let data = std::ptr::from_ref(data).cast_mut();
            port_access(fd, board, port, data, false)
        }
        Ok(other) => end_of(&other),
        Err(error) => match error.errno() {
            libc::EINTR | libc::EAGAIN => Next::Look,
            errno => failed(errno),
        },
    }
}

/// Lets KVM finish the exit that was answered last, without entering the guest.
pub fn complete(fd: &mut VcpuFd) {
    fd.set_kvm_immediate_exit(1);
    // With the flag set this never enters the guest; it returns EINTR.
    let _ = fd.run();
}

/// One access, or a string of them (`rep ins`, `rep outs`) to one port.
#[allow(unsafe_code)] // The exit's data and width lie in kvm_run.
fn port_access(fd: &mut VcpuFd, board: &Board, port: u16, data: *mut [u8], read: bool) -> Next {
    // SAFETY: after KVM_EXIT_IO this is the member of the union in use.
    let width = usize::from(unsafe { fd.get_kvm_run().__bindgen_anon_1.io.size }).max(1);
    // SAFETY: the slice lies in the vCPU's kvm_run mapping, beside the
    // structure, and KVM touches it only inside KVM_RUN, which is not called
    // while it is borrowed here.
    let data = unsafe { &mut *data };
    if LazyPit::has(port) {
        for byte in data.chunks_mut(width) {
            if read {
                byte.fill(board.pit.read(port));
            } else {
                board.pit.write(port, byte[0]);
            }
        }
    } else if read {
        board.ports.read_each(port.into(), width, data);
    } else {
        board.ports.write_each(port.into(), width, data);
        if board.power.request().is_some() {
            return Next::Look;
        }
    }
    Next::Run
}

fn end_of(exit: &VcpuExit<'_>) -> Next {
    use ExitReason::{GuestFault, HostError, Shutdown};
    match exit {
        VcpuExit::Intr | VcpuExit::IrqWindowOpen => Next::Look,
        VcpuExit::SystemEvent(SYSTEM_EVENT_SHUTDOWN, _) => end(Shutdown, "the guest powered off"),
        VcpuExit::SystemEvent(SYSTEM_EVENT_RESET, _) => end(Shutdown, "the guest reset"),
        VcpuExit::SystemEvent(SYSTEM_EVENT_CRASH, _) => {
            end(GuestFault, "the guest reported that it crashed")
        }
        VcpuExit::Shutdown => end(GuestFault, "the guest crashed: triple fault"),
        VcpuExit::InternalError => end(
            GuestFault,
            "the guest did something that KVM can't carry out or emulate",
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
