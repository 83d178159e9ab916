//! Gives a link an address and sets it up, in measuring guests and on their host.

use anyhow::{Context, Result, ensure};
use jiffy_sys::netlink::NetlinkSocket;
use std::net::Ipv4Addr;

// Linux, uapi/linux/netlink.h, rtnetlink.h, if_addr.h and if.h.
const REQUEST_ACK: u16 = 1 | 4;
const CREATE: u16 = 0x400;
const ERROR: u16 = 2;
const NEW_LINK: u16 = 16;
const NEW_ADDRESS: u16 = 20;
const LOCAL: u16 = 2;
const UP: u32 = 1;
const HEADER: usize = 16;

/// Index of the link of that name.
///
/// # Errors
///
/// If there is no such link.
pub fn index_of(name: &str) -> Result<u32> {
    use rustix::net::{AddressFamily, SocketType, netdevice, socket};
    let socket = socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    netdevice::name_to_index(socket, name).with_context(|| format!("the link {name}"))
}

/// Gives the link this address, in a network of `prefix` bits, and sets it up.
///
/// # Errors
///
/// If the kernel refuses the address, or to set the link up.
pub fn set_up(index: u32, address: Ipv4Addr, prefix: u8) -> Result<()> {
    let mut socket = NetlinkSocket::open(None)?;
    let inet = rustix::net::AddressFamily::INET.as_raw() as u8;
    // struct ifaddrmsg: family, prefix, flags, scope, index; then an attribute.
    let mut body = vec![inet, prefix, 0, 0];
    body.extend(index.to_le_bytes());
    body.extend(8u16.to_le_bytes());
    body.extend(LOCAL.to_le_bytes());
    body.extend(address.octets());
    ask(&mut socket, NEW_ADDRESS, CREATE, &body).context("the link's address")?;
    // struct ifinfomsg: family, padding, type, index, flags, change.
    let words = [0, index, UP, UP];
    let body: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    ask(&mut socket, NEW_LINK, 0, &body).context("setting the link up")
}

fn ask(socket: &mut NetlinkSocket, kind: u16, flags: u16, body: &[u8]) -> Result<()> {
    let mut message = Vec::new();
    message.extend(((HEADER + body.len()) as u32).to_le_bytes());
    message.extend(kind.to_le_bytes());
    message.extend((REQUEST_ACK | flags).to_le_bytes());
    message.extend([0; 8]);
    message.extend(body);
    socket.send(&message)?;
    let answer = socket.receive(true)?.context("no answer")?;
    let kind = answer.get(4..6).context("a short answer")?;
    ensure!(kind == ERROR.to_le_bytes(), "an unexpected answer");
    let code = answer.get(HEADER..).and_then(<[u8]>::first_chunk);
    match i32::from_le_bytes(*code.context("a short answer")?) {
        0 => Ok(()),
        code => Err(std::io::Error::from_raw_os_error(-code).into()),
    }
}
