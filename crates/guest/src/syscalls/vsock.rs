//! Addresses of AF_VSOCK (vsock(7)).

use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};

/// `struct sockaddr_vm`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct VsockAddress {
    family: u16,
    reserved: u16,
    port: u32,
    cid: u32,
    flags_and_padding: [u8; 4],
}

impl VsockAddress {
    /// CID of the host.
    pub const HOST: u32 = 2;
    /// Any CID of this guest.
    pub const ANY: u32 = u32::MAX;

    /// A port of the machine with this CID.
    pub fn new(cid: u32, port: u32) -> VsockAddress {
        VsockAddress {
            family: 40, // AF_VSOCK
            reserved: 0,
            port,
            cid,
            flags_and_padding: [0; 4],
        }
    }
}

// SAFETY: the pointer is to a complete `struct sockaddr_vm` that exists during the call.
unsafe impl SocketAddrArg for VsockAddress {
    unsafe fn with_sockaddr<R>(
        &self,
        f: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R,
    ) -> R {
        f(
            (&raw const *self).cast(),
            size_of::<VsockAddress>() as SocketAddrLen,
        )
    }
}
