//! Interprets any bytes as a story: actions of guest, programs and VMM.

use super::super::device::{Vsock, VsockArgs};
use super::super::packet::{HOST_CID, Header, Op, TYPE_STREAM};
use super::super::{BUFFER, CONNECTION_LIMIT};
use super::guest::{EVENT_IDX, GUEST_CID, Guest};
use crate::virtio::testing::Buffer;
use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// The ports that programs listen on, and that are connected to.
const PORTS: u32 = 4;

/// Most programs at once.
const PROGRAMS: usize = 32;

/// Plays `story` to a device with its sockets in `folder`, which must be empty, and is empty
/// afterwards. There are no other threads: the same story always has the same result.
///
/// # Panics
/// If the device panics, breaks the protocol or holds more than it may.
pub fn play(folder: &Path, story: &[u8]) {
    let listeners: Vec<UnixListener> = (0..PORTS)
        .map(|port| {
            let listener = UnixListener::bind(folder.join(format!("v_{port}"))).expect("binds");
            listener.set_nonblocking(true).expect("non-blocking");
            listener
        })
        .collect();
    let path = folder.join("v");
    let cid = GUEST_CID;
    let device = Vsock::new(VsockArgs { cid, path }).expect("a device");
    let mut guest = Guest::new(device, EVENT_IDX);
    guest.honest = false;
    let mut players = Players {
        guest: guest.start_by_hand(),
        listeners,
        programs: Vec::new(),
        folder,
        broken: false,
    };
    let mut script = Script(story);
    while let Some(deed) = script.byte() {
        players.act(deed, &mut script);
        let device = &players.guest.device;
        assert!(device.connection_count() <= CONNECTION_LIMIT);
        assert!(device.held_bytes() <= device.connection_count() * BUFFER as usize);
    }
    // Otherwise the device would wait for programs to read.
    players.programs.clear();
    players.listeners.clear();
    drop(players);
    for port in 0..PORTS {
        fs::remove_file(folder.join(format!("v_{port}"))).expect("removes");
    }
}

/// Reads a story; bytes past its end are zero.
struct Script<'s>(&'s [u8]);

impl Script<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn number(&mut self) -> u32 {
        let mut bytes = [0; 4];
        bytes.fill_with(|| self.byte().unwrap_or(0));
        u32::from_le_bytes(bytes)
    }

    fn long(&mut self) -> u64 {
        u64::from(self.number()) << 32 | u64::from(self.number())
    }

    fn small(&mut self, below: u32) -> u32 {
        u32::from(self.byte().unwrap_or(0)) % below
    }

    /// The story contains sizes, but no contents.
    fn bytes(&mut self) -> Vec<u8> {
        let length = self.number() % 70_000;
        vec![length as u8; length as usize]
    }
}

struct Players<'f> {
    guest: Guest,
    listeners: Vec<UnixListener>,
    programs: Vec<UnixStream>,
    folder: &'f Path,
    /// The guest has broken its transmit ring; only a reset helps.
    broken: bool,
}

impl Players<'_> {
    fn act(&mut self, deed: u8, script: &mut Script) {
        match deed % 20 {
            0..=4 => self.packet(script),
            5 => self.chain(script),
            6 => self.wild_buffer(script),
            7 => self.guest.pump(),
            8 => self.call(script),
            9 => self.answer_call(),
            10 => self.accept(script),
            11 | 12 => self.program_writes(script),
            13 => self.program_reads(script),
            14 => self.program_leaves(script),
            15 => {
                let queues = self.guest.pause();
                self.guest.activate(queues);
            }
            16 if script.small(8) == 0 => {
                self.guest.reset_driver();
                self.broken = false;
            }
            17 => self.guest.restocks = false,
            18 => self.guest.restock(),
            19 if script.small(16) == 0 => {
                self.guest.break_transmit_ring();
                self.broken = true;
            }
            _ => {}
        }
    }

    /// Whether the transmit queue has space for this many descriptors.
    fn room(&mut self, descriptors: u16) -> bool {
        self.guest.pump();
        !self.broken && self.guest.has_room(descriptors)
    }

    fn ports(&self, script: &mut Script) -> (u32, u32) {
        let choice = script.byte().unwrap_or(0);
        match choice % 4 {
            // A connection that a program has requested.
            3 if !self.guest.sockets.is_empty() => {
                let mut known: Vec<_> = self.guest.sockets.keys().copied().collect();
                known.sort_unstable();
                known[usize::from(choice) % known.len()]
            }
            _ => (script.small(PORTS + 1), script.small(8)),
        }
    }

    /// Sends a packet that is mostly valid.
    fn packet(&mut self, script: &mut Script) {
        let ports = self.ports(script);
        let payload = match script.small(3) {
            0 => script.bytes(),
            _ => Vec::new(),
        };
        let mut header = Header {
            src_cid: GUEST_CID,
            dst_cid: HOST_CID,
            src_port: ports.1,
            dst_port: ports.0,
            len: payload.len() as u32,
            kind: TYPE_STREAM,
            op: Op::Rw as u16,
            buf_alloc: 1 << 18,
            ..Header::default()
        };
        if payload.is_empty() {
            header.op = script.small(9) as u16;
            header.flags = script.small(4);
        }
        let socket = self.guest.sockets.get(&ports);
        header.fwd_cnt = socket.map_or(0, |socket| socket.inbox.len() as u32);
        match script.small(24) {
            0 => header.src_cid = script.long(),
            1 => header.dst_cid = script.long(),
            2 => header.src_port = script.number(),
            3 => header.dst_port = script.number(),
            4 => header.len = script.number(),
            5 => header.kind = script.number() as u16,
            6 => header.op = script.number() as u16,
            7 => header.flags = script.number(),
            8 => header.buf_alloc = script.number(),
            9 => header.fwd_cnt = script.number(),
            _ => {}
        }
        if self.room(1) && payload.len() < 1 << 16 {
            self.guest.send(header, &payload);
        }
    }

    /// Sends any bytes, split anywhere.
    fn chain(&mut self, script: &mut Script) {
        let bytes: Vec<u8> = (0..script.small(120))
            .map(|_| script.byte().unwrap_or(0))
            .collect();
        let cut = (script.small(120) as usize).min(bytes.len());
        let (first, second) = bytes.split_at(cut);
        let writable = script.small(8) == 0;
        if self.room(2) {
            self.guest.send_chain(&[first, second], writable);
        }
    }

    /// Adds a buffer anywhere, to either queue.
    fn wild_buffer(&mut self, script: &mut Script) {
        let buffer = Buffer {
            address: script.long() >> script.small(64),
            length: script.number(),
            writable: script.small(2) == 0,
        };
        if self.room(1) {
            self.guest.send_buffers(&[buffer]);
        }
    }

    fn call(&mut self, script: &mut Script) {
        if self.programs.len() == PROGRAMS {
            self.programs.remove(0);
        }
        let Ok(mut program) = UnixStream::connect(self.folder.join("v")) else {
            return;
        };
        program.set_nonblocking(true).expect("non-blocking");
        let line = match script.small(4) {
            0 => script.bytes(),
            _ => format!("CONNECT {}\n", script.small(8)).into_bytes(),
        };
        let _ = program.write(&line).expect("an empty socket has room");
        self.programs.push(program);
    }

    fn answer_call(&mut self) {
        if self.room(1)
            && let Some(ports) = self.guest.requests.pop_front()
        {
            self.guest.send_op(ports, Op::Response, 0);
        }
    }

    fn accept(&mut self, script: &mut Script) {
        let listener = &self.listeners[script.small(PORTS) as usize];
        if self.programs.len() < PROGRAMS
            && let Ok((program, _)) = listener.accept()
        {
            program.set_nonblocking(true).expect("non-blocking");
            self.programs.push(program);
        }
    }

    fn program(&mut self, script: &mut Script) -> Option<&mut UnixStream> {
        let count = self.programs.len();
        match count {
            0 => None,
            _ => self.programs.get_mut(script.small(32) as usize % count),
        }
    }

    fn program_writes(&mut self, script: &mut Script) {
        let bytes = script.bytes();
        if let Some(program) = self.program(script) {
            // The socket may be full or the program gone; both are allowed.
            let _ = program.write(&bytes).unwrap_or(0);
        }
    }

    fn program_reads(&mut self, script: &mut Script) {
        let mut bytes = script.bytes();
        if let Some(program) = self.program(script) {
            let _ = program.read(&mut bytes).unwrap_or(0);
        }
    }

    fn program_leaves(&mut self, script: &mut Script) {
        let how = match script.small(4) {
            0 => Shutdown::Write,
            1 => Shutdown::Read,
            _ => Shutdown::Both,
        };
        if let Some(program) = self.program(script) {
            let _ = program.shutdown(how);
        }
    }
}
