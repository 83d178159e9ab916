//! A host, the outside, and guests, each in a network namespace of its own, with real links, rules
//! and packets. A guest is a TAP in its namespace that is connected to the host's TAP of that VM,
//! as a VMM would do, so that a real kernel makes its packets.

use crate::host::{Addresses, Attached};
use crate::links::{self, found};
use crate::netlink::{Batch, Channel, flags};
use jiffy_sys::tap::{Tap, TapOptions};
use jiffy_wire::mac::Mac;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Time limit of what must come. A computer may pause for seconds, and a lost first packet is sent
/// again after one. What the rules refuse is answered with a reset at once.
pub const TIMEOUT: Duration = Duration::from_secs(30);
/// How long tests wait for what must not come.
pub const SILENCE: Duration = Duration::from_millis(400);

/// A network namespace.
#[derive(Debug)]
pub struct Namespace(OwnedFd);

impl Namespace {
    pub fn new() -> Namespace {
        let made = thread::spawn(|| {
            #[allow(
                deprecated,
                reason = "of a thread's own, the network only: nothing is shared"
            )]
            rustix::thread::unshare(UnshareFlags::NEWNET)
                .expect("these tests need root (CAP_SYS_ADMIN, CAP_NET_ADMIN)");
            configure(|batch| up(batch, 1));
            File::open("/proc/thread-self/ns/net").expect("a namespace")
        });
        Namespace(made.join().expect("the thread ends").into())
    }

    /// Runs it inside the namespace.
    pub fn run<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let within = scope.spawn(|| {
                move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network))
                    .expect("the namespace is entered");
                body()
            });
            match within.join() {
                Ok(value) => value,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }
}

/// The host and the outside.
pub struct World {
    pub host: Namespace,
    pub outside: Namespace,
}

/// Addresses of outside hosts.
pub const PUBLIC: &str = "203.0.113.9";
pub const PRIVATE: &str = "10.77.0.1";
pub const METADATA: &str = "169.254.169.254";
pub const PUBLIC6: &str = "2001:db8:9::9";
pub const PRIVATE6: &str = "fd77::1";
/// The host's address on the outside link.
pub const HOST: &str = "198.51.100.1";
pub const HOST6: &str = "2001:db8:1::1";

impl World {
    pub fn new() -> World {
        let (host, outside) = (Namespace::new(), Namespace::new());
        let far = outside.0.as_raw_fd() as u32;
        host.run(|| {
            configure(|batch| veth(batch, "up0", "down0", far));
            let index = index("up0");
            configure(|batch| {
                up(batch, index);
                address(batch, index, HOST, 24);
                address(batch, index, HOST6, 64);
            });
            configure(|batch| {
                route(batch, index, "0.0.0.0", 0, Some("198.51.100.2"));
                route(batch, index, "::", 0, Some("2001:db8:1::2"));
            });
        });
        outside.run(|| {
            let index = index("down0");
            configure(|batch| {
                up(batch, index);
                address(batch, index, "198.51.100.2", 24);
                address(batch, index, "2001:db8:1::2", 64);
                for one in [PUBLIC, PRIVATE, METADATA] {
                    address(batch, 1, one, 32);
                }
                for one in [PUBLIC6, PRIVATE6] {
                    address(batch, 1, one, 128);
                }
            });
        });
        World { host, outside }
    }
}

/// A running guest.
pub struct Guest {
    pub namespace: Namespace,
    pub addresses: Addresses,
    end: Arc<AtomicBool>,
}

impl Guest {
    /// Configured like jiffy-init does it.
    pub fn start(attached: Attached) -> Guest {
        let addresses = attached.addresses;
        let namespace = Namespace::new();
        let tap = namespace.run(|| {
            let tap = Tap::create(&TapOptions {
                name: c"eth0",
                queues: 1,
                owner: None,
                offloads: true,
                persistent: false,
            });
            let tap = tap.expect("a TAP");
            configure(|batch| {
                hardware(batch, tap.index, addresses.mac);
                up(batch, tap.index);
            });
            configure(|batch| guest_addresses(batch, tap.index, &addresses));
            tap
        });
        let end = Arc::new(AtomicBool::new(false));
        let ends = end.clone();
        thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                carry(&attached.tap.queues[0], &tap.queues[0]);
            }
        });
        Guest {
            namespace,
            addresses,
            end,
        }
    }

    /// Can it connect to a TCP server?
    pub fn reaches(&self, address: &str, port: u16) -> bool {
        self.namespace.run(|| connects(address, port))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
    }
}

/// Copies packets in both directions.
fn carry(a: &OwnedFd, b: &OwnedFd) {
    let mut fds = [PollFd::new(a, PollFlags::IN), PollFd::new(b, PollFlags::IN)];
    let short = Timespec {
        tv_sec: 0,
        tv_nsec: 20_000_000,
    };
    let _ = poll(&mut fds, Some(&short));
    let mut packet = vec![0; 70_000];
    for (from, to) in [(a, b), (b, a)] {
        while let Ok(length) = rustix::io::read(from, &mut packet) {
            let _ = rustix::io::write(to, &packet[..length]);
        }
    }
}

/// A server that answers each connection with `answer` and the client's address.
pub struct Server {
    end: Arc<AtomicBool>,
}

impl Server {
    pub fn tcp(namespace: &Namespace, address: &str, port: u16, answer: &'static str) -> Server {
        let at = SocketAddr::new(address.parse().expect("an address"), port);
        let listener = namespace.run(|| TcpListener::bind(at).expect("a port"));
        listener.set_nonblocking(true).expect("a socket");
        let end = Arc::new(AtomicBool::new(false));
        let ends = end.clone();
        thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((mut stream, from)) => {
                        let _ = write!(stream, "{answer} {}", from.ip());
                        let _ = stream.shutdown(Shutdown::Write);
                    }
                    Err(_) => thread::sleep(Duration::from_millis(5)),
                }
            }
        });
        Server { end }
    }

    pub fn udp(namespace: &Namespace, address: &str, port: u16, answer: &'static str) -> Server {
        let at = SocketAddr::new(address.parse().expect("an address"), port);
        let socket = namespace.run(|| UdpSocket::bind(at).expect("a port"));
        let short = Duration::from_millis(20);
        socket.set_read_timeout(Some(short)).expect("a socket");
        let end = Arc::new(AtomicBool::new(false));
        let ends = end.clone();
        thread::spawn(move || {
            let mut packet = [0; 2048];
            while !ends.load(Ordering::Relaxed) {
                if let Ok((_, from)) = socket.recv_from(&mut packet) {
                    let _ = socket.send_to(format!("{answer} {}", from.ip()).as_bytes(), from);
                }
            }
        });
        Server { end }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
    }
}

/// Can this thread connect to a TCP server?
pub fn connects(address: &str, port: u16) -> bool {
    connect(address, port, TIMEOUT).is_ok()
}

/// The same within a short time: packets to this server are dropped, not refused.
pub fn connects_soon(address: &str, port: u16) -> bool {
    connect(address, port, SILENCE).is_ok()
}

fn connect(address: &str, port: u16, limit: Duration) -> io::Result<TcpStream> {
    let at = SocketAddr::new(address.parse().expect("an address"), port);
    TcpStream::connect_timeout(&at, limit)
}

/// The text that a TCP server sends to this thread.
pub fn hear(address: &str, port: u16) -> Option<String> {
    let mut stream = connect(address, port, TIMEOUT).ok()?;
    stream.set_read_timeout(Some(TIMEOUT)).ok()?;
    let mut said = String::new();
    stream.read_to_string(&mut said).ok()?;
    Some(said)
}

/// The text that a UDP server sends to this thread.
pub fn ask(address: &str, port: u16) -> Option<String> {
    let at = SocketAddr::new(address.parse().expect("an address"), port);
    let any = if at.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).ok()?;
    socket.set_read_timeout(Some(TIMEOUT)).ok()?;
    socket.send_to(b"?", at).ok()?;
    let mut said = [0; 200];
    let (length, _) = socket.recv_from(&mut said).ok()?;
    Some(String::from_utf8_lossy(&said[..length]).into_owned())
}

/// Sends a request to the kernel in this thread's namespace.
pub fn configure(write: impl FnOnce(&mut Batch)) {
    let mut channel = Channel::route().expect("a netlink socket");
    let mut batch = Batch::new();
    write(&mut batch);
    let last = batch.len() - 1;
    channel.transact(batch, last).expect("the kernel does it");
}

/// Index of a link in this thread's namespace, if it exists.
pub fn find_index(name: &str) -> Option<u32> {
    let mut channel = Channel::route().expect("a netlink socket");
    let links = found::links(&mut channel).expect("links");
    links.iter().find(|it| it.name == name).map(|it| it.index)
}

/// Index of an existing link.
pub fn index(name: &str) -> u32 {
    find_index(name).unwrap_or_else(|| panic!("no link {name}"))
}

const NEW_LINK: u16 = 16;
const NEW_ADDRESS: u16 = 20;
const NEW_ROUTE: u16 = 24;
const NEW_NEIGHBOUR: u16 = 28;
const NEW: u16 = flags::CREATE | flags::REPLACE;

fn ifinfo(index: u32, flags: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[4..8].copy_from_slice(&index.to_ne_bytes());
    bytes[8..12].copy_from_slice(&flags.to_ne_bytes());
    bytes[12..].copy_from_slice(&flags.to_ne_bytes());
    bytes
}

pub fn up(batch: &mut Batch, index: u32) {
    batch.message(NEW_LINK, 0, |it| _ = it.fixed(&ifinfo(index, 1)));
}

/// Sets the MAC address, and disables automatic IPv6 addresses.
fn hardware(batch: &mut Batch, index: u32, mac: Mac) {
    batch.message(NEW_LINK, 0, |it| {
        it.fixed(&ifinfo(index, 0)).bytes(1, &mac.0);
    });
}

fn veth(batch: &mut Batch, name: &str, peer: &str, namespace: u32) {
    batch.message(NEW_LINK, flags::CREATE, |it| {
        it.fixed(&ifinfo(0, 0)).text(3, name);
        it.nested(18, |it| {
            it.text(1, "veth");
            it.nested(2, |it| {
                it.nested(1, |it| {
                    it.fixed(&ifinfo(0, 0)).text(3, peer);
                    it.bytes(28, &namespace.to_ne_bytes());
                });
            });
        });
    });
}

fn bytes(address: &str) -> (u8, Vec<u8>) {
    match address.parse().expect("an address") {
        IpAddr::V4(it) => (2, it.octets().to_vec()),
        IpAddr::V6(it) => (10, it.octets().to_vec()),
    }
}

pub fn address(batch: &mut Batch, index: u32, address: &str, prefix: u8) {
    const NODAD: u8 = 2;
    let (family, bytes) = bytes(address);
    batch.message(NEW_ADDRESS, NEW, |it| {
        let mut header = vec![family, prefix, NODAD, 0];
        header.extend_from_slice(&index.to_ne_bytes());
        it.fixed(&header).bytes(2, &bytes).bytes(1, &bytes);
    });
}

pub fn route(batch: &mut Batch, index: u32, to: &str, prefix: u8, gateway: Option<&str>) {
    let (family, to) = bytes(to);
    let scope = if gateway.is_some() || family == 10 {
        0
    } else {
        253
    };
    batch.message(NEW_ROUTE, NEW, |it| {
        it.fixed(&[family, prefix, 0, 0, 254, 4, scope, 1, 0, 0, 0, 0]);
        it.bytes(1, &to).bytes(4, &index.to_ne_bytes());
        if let Some(gateway) = gateway {
            it.bytes(5, &bytes(gateway).1);
        }
    });
}

pub fn neighbour(batch: &mut Batch, index: u32, address: &str, mac: Mac) {
    const PERMANENT: u8 = 0x80;
    let (family, address) = bytes(address);
    batch.message(NEW_NEIGHBOUR, NEW, |it| {
        let mut header = vec![family, 0, 0, 0];
        header.extend_from_slice(&index.to_ne_bytes());
        header.extend_from_slice(&[PERMANENT, 0, 0, 0]);
        it.fixed(&header).bytes(1, &address).bytes(2, &mac.0);
    });
}

fn guest_addresses(batch: &mut Batch, index: u32, it: &Addresses) {
    let mut kind = |own: String, bits: u8, gateway: String, any: &str| {
        address(batch, index, &own, bits);
        route(batch, index, &gateway, bits, None);
        neighbour(batch, index, &gateway, it.gateway_mac);
        route(batch, index, any, 0, Some(&gateway));
    };
    kind(it.v4.to_string(), 32, it.gateway.to_string(), "0.0.0.0");
    if let (Some(v6), Some(gateway)) = (it.v6, it.gateway6) {
        kind(v6.to_string(), 128, gateway.to_string(), "::");
    }
}

/// Names of our links, in this thread's namespace.
pub fn our_links() -> Vec<String> {
    let mut channel = Channel::route().expect("a netlink socket");
    let links = found::links(&mut channel).expect("links").into_iter();
    let ours = links.filter(links::is_ours).map(|it| it.name);
    ours.collect()
}
