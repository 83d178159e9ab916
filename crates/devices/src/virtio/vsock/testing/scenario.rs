//! Interprets any bytes as a sequence of actions of guest, programs and VMM.

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

/// Runs the actions that `bytes` encode on a device with its sockets in `folder`, which must be
/// empty, and is empty afterwards. Without other threads, the same bytes have the same result.
///
/// # Panics
///
/// If the device panics, breaks the protocol or holds more than it may.
pub fn run_scenario(folder: &Path, bytes: &[u8]) {
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
    let mut scenario = Scenario {
        guest: guest.start_by_hand(),
        listeners,
        programs: Vec::new(),
        folder,
        broken: false,
    };
    let mut input = InputReader(bytes);
    while let Some(action) = input.byte() {
        scenario.perform(action, &mut input);
        let device = &scenario.guest.device;
        assert!(device.connection_count() <= CONNECTION_LIMIT);
        assert!(device.held_bytes() <= device.connection_count() * BUFFER as usize);
    }
    // Otherwise the device would wait for programs to read.
    scenario.programs.clear();
    scenario.listeners.clear();
    drop(scenario);
    for port in 0..PORTS {
        fs::remove_file(folder.join(format!("v_{port}"))).expect("removes");
    }
}

/// Reads the input; bytes past its end are zero.
struct InputReader<'s>(&'s [u8]);

impl InputReader<'_> {
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

    /// The input contains sizes, but no contents.
    fn bytes(&mut self) -> Vec<u8> {
        let length = self.number() % 70_000;
        vec![length as u8; length as usize]
    }
}

struct Scenario<'f> {
    guest: Guest,
    listeners: Vec<UnixListener>,
    programs: Vec<UnixStream>,
    folder: &'f Path,
    /// The guest has broken its transmit ring; only a reset helps.
    broken: bool,
}

impl Scenario<'_> {
    fn perform(&mut self, action: u8, input: &mut InputReader) {
        match action % 20 {
            0..=4 => self.packet(input),
            5 => self.chain(input),
            6 => self.wild_buffer(input),
            7 => self.guest.pump(),
            8 => self.call(input),
            9 => self.answer_call(),
            10 => self.accept(input),
            11 | 12 => self.program_writes(input),
            13 => self.program_reads(input),
            14 => self.program_leaves(input),
            15 => {
                let queues = self.guest.pause();
                self.guest.activate(queues);
            }
            16 if input.small(8) == 0 => {
                self.guest.reset_driver();
                self.broken = false;
            }
            17 => self.guest.restocks = false,
            18 => self.guest.restock(),
            19 if input.small(16) == 0 => {
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

    fn ports(&self, input: &mut InputReader) -> (u32, u32) {
        let choice = input.byte().unwrap_or(0);
        match choice % 4 {
            // A connection that a program has requested.
            3 if !self.guest.sockets.is_empty() => {
                let mut known: Vec<_> = self.guest.sockets.keys().copied().collect();
                known.sort_unstable();
                known[usize::from(choice) % known.len()]
            }
            _ => (input.small(PORTS + 1), input.small(8)),
        }
    }

    /// Sends a packet that is mostly valid.
    fn packet(&mut self, input: &mut InputReader) {
        let ports = self.ports(input);
        let payload = match input.small(3) {
            0 => input.bytes(),
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
            header.op = input.small(9) as u16;
            header.flags = input.small(4);
        }
        let socket = self.guest.sockets.get(&ports);
        header.fwd_cnt = socket.map_or(0, |socket| socket.inbox.len() as u32);
        match input.small(24) {
            0 => header.src_cid = input.long(),
            1 => header.dst_cid = input.long(),
            2 => header.src_port = input.number(),
            3 => header.dst_port = input.number(),
            4 => header.len = input.number(),
            5 => header.kind = input.number() as u16,
            6 => header.op = input.number() as u16,
            7 => header.flags = input.number(),
            8 => header.buf_alloc = input.number(),
            9 => header.fwd_cnt = input.number(),
            _ => {}
        }
        if self.room(1) && payload.len() < 1 << 16 {
            self.guest.send(header, &payload);
        }
    }

    /// Sends any bytes, split anywhere.
    fn chain(&mut self, input: &mut InputReader) {
        let bytes: Vec<u8> = (0..input.small(120))
            .map(|_| input.byte().unwrap_or(0))
            .collect();
        let cut = (input.small(120) as usize).min(bytes.len());
        let (first, second) = bytes.split_at(cut);
        let writable = input.small(8) == 0;
        if self.room(2) {
            self.guest.send_chain(&[first, second], writable);
        }
    }

    /// Adds a buffer anywhere, to either queue.
    fn wild_buffer(&mut self, input: &mut InputReader) {
        let buffer = Buffer {
            address: input.long() >> input.small(64),
            length: input.number(),
            writable: input.small(2) == 0,
        };
        if self.room(1) {
            self.guest.send_buffers(&[buffer]);
        }
    }

    fn call(&mut self, input: &mut InputReader) {
        if self.programs.len() == PROGRAMS {
            self.programs.remove(0);
        }
        let Ok(mut program) = UnixStream::connect(self.folder.join("v")) else {
            return;
        };
        program.set_nonblocking(true).expect("non-blocking");
        let line = match input.small(4) {
            0 => input.bytes(),
            _ => format!("CONNECT {}\n", input.small(8)).into_bytes(),
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

    fn accept(&mut self, input: &mut InputReader) {
        let listener = &self.listeners[input.small(PORTS) as usize];
        if self.programs.len() < PROGRAMS
            && let Ok((program, _)) = listener.accept()
        {
            program.set_nonblocking(true).expect("non-blocking");
            self.programs.push(program);
        }
    }

    fn program(&mut self, input: &mut InputReader) -> Option<&mut UnixStream> {
        let count = self.programs.len();
        match count {
            0 => None,
            _ => self.programs.get_mut(input.small(32) as usize % count),
        }
    }

    fn program_writes(&mut self, input: &mut InputReader) {
        let bytes = input.bytes();
        if let Some(program) = self.program(input) {
            // The socket may be full or the program gone; both are allowed.
            let _ = program.write(&bytes).unwrap_or(0);
        }
    }

    fn program_reads(&mut self, input: &mut InputReader) {
        let mut bytes = input.bytes();
        if let Some(program) = self.program(input) {
            let _ = program.read(&mut bytes).unwrap_or(0);
        }
    }

    fn program_leaves(&mut self, input: &mut InputReader) {
        let how = match input.small(4) {
            0 => Shutdown::Write,
            1 => Shutdown::Read,
            _ => Shutdown::Both,
        };
        if let Some(program) = self.program(input) {
            let _ = program.shutdown(how);
        }
    }
}
