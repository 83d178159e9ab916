//! The guest's end of a VM's connection to its passt: a little TCP. passt reads no checksums.

use crate::client::TIMEOUT;
use crate::daemon::Daemon;
use jiffy_wire::api::Vm;
use jiffy_wire::vmm::{Net, NetBackend, Source, VmmConfig};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::unix::net::UnixStream;

const FIN: u8 = 1;
const SYN: u8 = 2;
const PUSH: u8 = 8;
const ACK: u8 = 16;
const TCP: u8 = 6;
const UDP: u8 = 17;
const HEADERS: usize = 14 + 20;
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 118, 0, 2);
const GATEWAY_MAC: [u8; 6] = [0x02, 0x6a, 0x66, 0, 0, 1];

/// A VM's guest, as its passt sees it.
pub struct Guest {
    socket: UnixStream,
    mac: [u8; 6],
    next_port: u16,
}

/// The ends of a connection: the guest's port, and the other address.
type Ends = (u16, SocketAddrV4);

struct Segment {
    ends: Ends,
    sequence: u32,
    flags: u8,
    data: Vec<u8>,
}

/// The only interface in the configuration of a VM's monitor.
pub fn interface(daemon: &Daemon, vm: &Vm) -> Net {
    let text = fs::read(daemon.vm_folder(&vm.id).join("vmm.json")).unwrap();
    let config: VmmConfig = serde_json::from_slice(&text).unwrap();
    let [net] = &config.nets[..] else {
        panic!("{:?}", config.nets)
    };
    net.clone()
}

impl Guest {
    /// Takes the place of the VM's monitor, which was no spare. Needs root.
    pub fn of(daemon: &Daemon, vm: &Vm) -> Guest {
        let net = interface(daemon, vm);
        let NetBackend::Passt(Source::Fd(number)) = net.backend else {
            panic!("{net:?}")
        };
        let pid = daemon.vm(&vm.id).pid.expect("a monitor");
        let pid = Pid::from_raw(pid as i32).unwrap();
        let process = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let socket = pidfd_getfd(process, number, PidfdGetfdFlags::empty()).unwrap();
        let socket = UnixStream::from(socket);
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        Guest {
            socket,
            mac: net.mac.0,
            next_port: 40_000,
        }
    }

    /// Answers the next connection to this port with `text`; returns the client's address, and what
    /// it sent until it shut down its direction.
    pub fn serve(&mut self, port: u16, text: &str) -> (Ipv4Addr, String) {
        let begun = self.tcp(|it| it.ends.0 == port && it.flags & (SYN | ACK) == SYN);
        let ends = begun.ends;
        let mut received = begun.sequence.wrapping_add(1);
        self.send_tcp(ends, 100, received, SYN | ACK, b"");
        let mut said = Vec::new();
        loop {
            let next = self.tcp(|it| it.ends == ends);
            if next.sequence == received {
                said.extend(&next.data);
                received = received.wrapping_add(next.data.len() as u32);
                self.send_tcp(ends, 101, received, ACK, b"");
                if next.flags & FIN != 0 {
                    break;
                }
            }
        }
        received = received.wrapping_add(1);
        let flags = PUSH | ACK | FIN;
        self.send_tcp(ends, 101, received, flags, text.as_bytes());
        (*ends.1.ip(), String::from_utf8(said).unwrap())
    }

    /// Connects to a server; returns what it sends first.
    pub fn ask(&mut self, server: SocketAddrV4) -> String {
        let ends = (self.next_port, server);
        self.next_port += 1;
        self.send_tcp(ends, 500, 0, SYN, b"");
        let answer = self.tcp(|it| it.ends == ends);
        assert_eq!(answer.flags & (SYN | ACK), SYN | ACK, "it is not refused");
        let received = answer.sequence.wrapping_add(1);
        self.send_tcp(ends, 501, received, ACK, b"");
        let first = self.tcp(|it| it.ends == ends && !it.data.is_empty());
        String::from_utf8(first.data).unwrap()
    }

    /// Sends a datagram from a port.
    pub fn say(&mut self, from: u16, to: SocketAddrV4, data: &[u8]) {
        let mut datagram = ports(from, to);
        datagram.extend((8 + data.len() as u16).to_be_bytes());
        datagram.extend([0, 0]);
        datagram.extend(data);
        self.send(*to.ip(), UDP, &datagram);
    }

    /// The next datagram to a port, and where it comes from.
    pub fn hear(&mut self, port: u16) -> (SocketAddrV4, Vec<u8>) {
        loop {
            let frame = self.receive();
            if let Some((ends, rest)) = of_packet(&frame, UDP)
                && ends.0 == port
            {
                return (ends.1, rest[4..].to_vec());
            }
        }
    }

    fn tcp(&mut self, wanted: impl Fn(&Segment) -> bool) -> Segment {
        loop {
            let frame = self.receive();
            let Some((ends, rest)) = of_packet(&frame, TCP) else {
                continue;
            };
            let segment = Segment {
                ends,
                sequence: u32::from_be_bytes(rest[..4].try_into().unwrap()),
                flags: rest[9],
                data: rest[usize::from(rest[8] >> 4) * 4 - 4..].to_vec(),
            };
            if wanted(&segment) {
                return segment;
            }
        }
    }

    fn send_tcp(&mut self, ends: Ends, sequence: u32, received: u32, flags: u8, data: &[u8]) {
        let mut segment = ports(ends.0, ends.1);
        segment.extend(sequence.to_be_bytes());
        segment.extend(received.to_be_bytes());
        segment.extend([5 << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
        segment.extend(data);
        self.send(*ends.1.ip(), TCP, &segment);
    }

    fn send(&mut self, to: Ipv4Addr, protocol: u8, payload: &[u8]) {
        let whole = (20 + payload.len() as u16).to_be_bytes();
        let mut frame = [&GATEWAY_MAC[..], &self.mac, &[8, 0, 0x45, 0], &whole].concat();
        frame.extend([0, 0, 0, 0, 64, protocol, 0, 0]);
        frame.extend(ADDRESS.octets());
        frame.extend(to.octets());
        frame.extend(payload);
        let length = (frame.len() as u32).to_be_bytes();
        // In one write: Debian 12's passt loses a length that it reads alone.
        self.socket
            .write_all(&[&length[..], &frame].concat())
            .unwrap();
    }

    fn receive(&mut self) -> Vec<u8> {
        let mut length = [0; 4];
        self.socket.read_exact(&mut length).expect("a frame");
        let mut frame = vec![0; u32::from_be_bytes(length) as usize];
        self.socket.read_exact(&mut frame).unwrap();
        // Linux drops TCP in frames to all.
        assert_eq!(frame[..6], self.mac);
        frame
    }
}

fn ports(from: u16, to: SocketAddrV4) -> Vec<u8> {
    [from.to_be_bytes(), to.port().to_be_bytes()].concat()
}

/// The ends of a packet of this protocol, and what follows its ports.
fn of_packet(frame: &[u8], protocol: u8) -> Option<(Ends, &[u8])> {
    let is_packet = frame[12..14] == [8, 0] && frame[14] == 0x45 && frame[23] == protocol;
    let (packet, rest) = frame.split_at_checked(HEADERS + 4).filter(|_| is_packet)?;
    let from: [u8; 4] = packet[26..30].try_into().unwrap();
    let port = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
    let server = SocketAddrV4::new(from.into(), port(HEADERS));
    Some(((port(HEADERS + 2), server), rest))
}
