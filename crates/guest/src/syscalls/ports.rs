//! I/O ports: the trace port, and the ports of fw_cfg.

use super::raw::{number, syscall};
use core::arch::asm;
use rustix::io::{Errno, Result};

/// Arguments of ioperm(2) that drop access to all ports in one call.
pub(super) const DROP_ALL: [usize; 5] = [0, 0x1_0000, 0, 0, 0];

/// Drops access to all ports, because programs that this process executes would inherit it.
///
/// # Errors
///
/// `ENOMEM` if the kernel has no memory for the change. A kernel without `ioperm` is no error.
pub fn drop_all() -> Result<()> {
    // SAFETY: takes numbers.
    drop_result(unsafe { syscall(number::IOPERM, DROP_ALL) })
}

/// Interprets ioperm(2)'s result. If the process had ports, the call fails only for lack of memory.
/// A kernel without the call never granted any.
pub(super) fn drop_result(result: isize) -> Result<()> {
    let no_memory = -(Errno::NOMEM.raw_os_error() as isize);
    if result == no_memory {
        Err(Errno::NOMEM)
    } else {
        Ok(())
    }
}

/// Permission to use `count` ports from `first` on. Later calls extend it.
#[derive(Debug, Clone, Copy)]
pub struct Ports {
    first: u16,
    count: u16,
}

impl Ports {
    /// Requests the ports (ioperm(2)); `None` if the kernel lacks the call or refuses.
    pub fn open(first: u16, count: u16) -> Option<Ports> {
        // SAFETY: takes numbers.
        let result = unsafe { syscall(number::IOPERM, [first as usize, count as usize, 1, 0, 0]) };
        (result == 0).then_some(Ports { first, count })
    }

    fn port(&self, offset: u16) -> u16 {
        assert!(offset < self.count);
        self.first + offset
    }

    /// Writes one byte to the port `offset` after the first.
    pub fn write_byte(&self, offset: u16, value: u8) {
        // SAFETY: the kernel granted the port; a port write touches no memory.
        unsafe {
            asm!("out dx, al", in("dx") self.port(offset), in("al") value,
                 options(nomem, nostack, preserves_flags));
        }
    }

    /// Writes a little-endian word at `offset`.
    pub fn write_word(&self, offset: u16, value: u16) {
        // SAFETY: as above; `port(offset + 1)` checks the word's second half.
        self.port(offset + 1);
        unsafe {
            asm!("out dx, ax", in("dx") self.port(offset), in("ax") value,
                 options(nomem, nostack, preserves_flags));
        }
    }

    /// Fills `bytes` by reading the port `offset` after the first.
    pub fn read_bytes(&self, offset: u16, bytes: &mut [u8]) {
        // SAFETY: the kernel granted the port; `rep insb` writes exactly
        // `bytes.len()` bytes from its start (the direction flag is clear by
        // the ABI).
        unsafe {
            asm!("rep insb", in("dx") self.port(offset),
                 inout("rdi") bytes.as_mut_ptr() => _,
                 inout("rcx") bytes.len() => _,
                 options(nostack, preserves_flags));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_access_is_dropped_or_enomem_is_reported() {
        for harmless in [0, -38, -1] {
            assert_eq!(drop_result(harmless), Ok(()));
        }
        assert_eq!(drop_result(-12), Err(Errno::NOMEM));
        assert_eq!(drop_all(), Ok(()));
    }
}
