//! A guest that is not Linux finds and uses a disk and a network interface, as
//! `docs/guest-interface.md` describes them: `testkernel/clients.c`.

use super::{Case, from, wait_for};
use jiffy_devices::bus::BusDevice;
use jiffy_sys::mutex::lock;
use jiffy_vmm::Vmm;
use jiffy_vmm::devices::net::NetKind;
use jiffy_vmm::devices::virtio::Virtio;
use jiffy_vmm::sandbox::violation;
use jiffy_wire::mac::Mac;
use jiffy_wire::vmm::{Disk, Net, NetBackend, Source};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

/// Register of virtio-mmio that counts changes of the configuration.
const CONFIG_GENERATION: u64 = 0xfc;
const SECTOR: usize = 512;
const PEER: [u8; 6] = [2, 0, 0, 0, 0, 9];
const PEER_ADDRESS: [u8; 4] = [10, 0, 0, 9];
const GUEST_ADDRESS: [u8; 4] = [10, 0, 0, 2];

/// What the guest expects in a sector.
fn pattern(sector: usize) -> Vec<u8> {
    (0..SECTOR).map(|at| (sector + at) as u8).collect()
}

fn arp(operation: u8, sender: ([u8; 6], [u8; 4]), target: ([u8; 6], [u8; 4])) -> Vec<u8> {
    let head = [0, 1, 8, 0, 6, 4, 0, operation];
    [&head[..], &sender.0, &sender.1, &target.0, &target.1].concat()
}

/// The ones' complement of the sum of big endian words, as IP and ICMP use it.
fn checksum(bytes: &[u8]) -> [u8; 2] {
    let words = bytes
        .chunks(2)
        .map(|word| u16::from_be_bytes([word[0], word[1]]));
    let mut sum: u32 = words.map(u32::from).sum();
    sum = (sum & 0xffff) + (sum >> 16);
    (!(sum + (sum >> 16)) as u16).to_be_bytes()
}

fn echo(kind: u8, source: [u8; 4], destination: [u8; 4], sequence: u8) -> Vec<u8> {
    let mut icmp = [&[kind, 0, 0, 0, 0x12, 0x34, 0, sequence][..], &[0xa5; 48]].concat();
    let sum = checksum(&icmp);
    icmp[2..4].copy_from_slice(&sum);
    let length = 20 + icmp.len() as u8;
    let mut ip = [
        &[0x45, 0, 0, length, 0, 0, 0, 0, 64, 1, 0, 0][..],
        &source,
        &destination,
    ]
    .concat();
    let sum = checksum(&ip);
    ip[10..12].copy_from_slice(&sum);
    [ip, icmp].concat()
}

/// The other end of the guest's network: each frame follows its length.
struct Peer {
    socket: UnixStream,
    received: Vec<u8>,
}

impl Peer {
    fn of(listener: &UnixListener) -> Peer {
        let (socket, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        Peer {
            socket,
            received: Vec::new(),
        }
    }

    fn send(&mut self, to: [u8; 6], kind: u16, packet: &[u8]) {
        let frame = [&to[..], &PEER, &kind.to_be_bytes(), packet].concat();
        let length = (frame.len() as u32).to_be_bytes();
        self.socket
            .write_all(&[&length[..], &frame].concat())
            .unwrap();
    }

    /// The next frame of the guest: its source, type and packet.
    fn receive(&mut self, vmm: &mut Vmm) -> (Vec<u8>, u16, Vec<u8>) {
        let frame = wait_for("a frame of the guest", || {
            assert_eq!(vmm.process_events(), None);
            let mut bytes = [0; 2048];
            match self.socket.read(&mut bytes) {
                Ok(count) => self.received.extend_from_slice(&bytes[..count]),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            let (length, rest) = self.received.split_first_chunk()?;
            let frame = rest.get(..u32::from_be_bytes(*length) as usize)?.to_vec();
            self.received.drain(..4 + frame.len());
            Some(frame)
        });
        assert_eq!(frame[..6], PEER);
        let kind = u16::from_be_bytes([frame[12], frame[13]]);
        (frame[6..12].to_vec(), kind, frame[14..].to_vec())
    }

    /// Asks for the guest's hardware address, then pings it.
    fn ping(&mut self, vmm: &mut Vmm, guest: [u8; 6], sequence: u8) {
        let me = (PEER, PEER_ADDRESS);
        self.send([0xff; 6], 0x806, &arp(1, me, ([0; 6], GUEST_ADDRESS)));
        let answer = arp(2, (guest, GUEST_ADDRESS), me);
        assert_eq!(self.receive(vmm), (guest.to_vec(), 0x806, answer));
        self.send(
            guest,
            0x800,
            &echo(8, PEER_ADDRESS, GUEST_ADDRESS, sequence),
        );
        let answer = echo(0, GUEST_ADDRESS, PEER_ADDRESS, sequence);
        assert_eq!(self.receive(vmm), (guest.to_vec(), 0x800, answer));
    }
}

/// For an echo request the guest reads the sector of its sequence number, and copies it to the next.
#[test]
#[ignore = "needs a real KVM"]
fn a_guest_other_than_linux_uses_disk_and_network_also_when_restored() {
    let mut case = Case::new("devices");
    let disk = case.path("disk");
    let mut sectors: Vec<u8> = (0..64).flat_map(pattern).collect();
    sectors[4 * SECTOR..5 * SECTOR].fill(0);
    sectors[6 * SECTOR..7 * SECTOR].fill(0);
    std::fs::write(&disk, &sectors).unwrap();
    let socket = case.path("network.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let guest = [2, 0, 0, 0, 0, 2];
    case.config.disks.push(Disk {
        path: disk.clone(),
        ..Disk::default()
    });
    case.config.rng = true;
    case.config.nets.push(Net {
        mac: Mac(guest),
        mtu: None,
        backend: NetBackend::Passt(Source::Path(socket)),
        guard: None,
        receive_limit: Default::default(),
        send_limit: Default::default(),
    });
    let mut vmm = case.start();
    let mut peer = Peer::of(&listener);
    // More requests than a queue has entries.
    for _ in 0..3 {
        peer.ping(&mut vmm, guest, 3);
    }
    let copied = |sector: usize| {
        let sectors = std::fs::read(&disk).unwrap();
        sectors[(sector + 1) * SECTOR..][..SECTOR] == pattern(sector)
    };
    assert!(copied(3) && !copied(5));

    let capture = vmm.capture(false).unwrap();
    drop(vmm);
    case.config.restore = Some(from(&capture));
    let clone = [2, 0, 0, 0, 0, 3];
    case.config.nets[0].mac = Mac(clone);
    let mut vmm = case.start();
    let mut peer = Peer::of(&listener);
    peer.ping(&mut vmm, clone, 5);
    assert!(copied(5));
    // The end of the peer does not end the VM.
    drop(peer);
    wait_for("the end of the link", || {
        assert_eq!(vmm.process_events(), None);
        assert_eq!(violation::first(), None);
        let mut generation = [0; 4];
        let network = vmm.devices().all::<Virtio<NetKind>>().next().unwrap();
        lock(network).read(CONFIG_GENERATION, &mut generation);
        (generation != [0; 4]).then_some(())
    });
}
