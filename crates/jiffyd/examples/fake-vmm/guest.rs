//! The guest: its PID 1 on the supervisor channel, and its first command.

use crate::channel::{Messages, send};
use crate::program::{Program, feed, start};
use crate::{Vm, spawn, wait_for_release};
use jiffy_sys::dial::{self, Dialer};
use jiffy_sys::handed;
use jiffy_wire::agent::{
    Command, ExecInput, ExitStatus, FromGuest, GuestSpan, MAIN_OUTPUT_WINDOW, SUPERVISOR_PORT,
    StartError, Stream, ToGuest, VERSION,
};
use jiffy_wire::frame::{self, MAX_DATA};
use jiffy_wire::trace;
use jiffy_wire::vmm::ExitReason;
use rustix::process::Signal;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

/// The file that marks the agent as gone.
pub const OFF: &str = "off";
/// How long a slow guest takes for a message.
const SLOW: Duration = Duration::from_millis(100);
/// Most input kept for a program that doesn't read.
const INPUT_WINDOW: usize = 128 * 1024;

#[derive(Default)]
pub struct Main {
    pub program: Option<Arc<Program>>,
    /// Input for the program, on its way to a thread that may block on it.
    pub input: Option<mpsc::Sender<ExecInput>>,
    /// Bytes of input that the program has read since the last credit.
    pub taken: u32,
    /// Credit that was sent to the node, but not counted by the reading thread yet.
    pub told_taken: u32,
    pub output: [Window; 2],
    pub exit: Option<ExitStatus>,
    pub failed: Option<StartError>,
    /// The end was reported on this connection; earlier confirmations are ignored.
    pub told_end: bool,
    pub end_stored: bool,
    pub broken: bool,
    pub welcomed: bool,
    /// The hello of the abandoned connection was sent.
    pub was_late: bool,
    pub powering_off: bool,
}

/// Bytes of a stream that the host has not stored.
#[derive(Default)]
pub struct Window {
    pub base: u64,
    pub sent: u64,
    pub bytes: Vec<u8>,
}

impl Vm {
    pub fn guest(self: &Arc<Vm>) {
        if self.script.mute || self.script.deaf && self.guest.main.is_none() {
            loop {
                thread::park();
            }
        }
        if self.script.held {
            wait_for_release();
        }
        if self.saved.is_some() {
            self.enter();
        } else {
            self.mark(trace::MARK_KERNEL_ENTRY);
            self.mark(trace::MARK_PID1);
        }
        if self.script.flood {
            spawn(self, |vm| {
                loop {
                    vm.mark(0x80);
                }
            });
        }
        if self.script.queries {
            self.query(false);
        }
        if self.script.query_flood {
            spawn(self, |vm| vm.query(true));
        }
        if self.script.garbage {
            self.garbage();
        }
        if self.script.storm {
            spawn(self, |vm| vm.storm());
        }
        if let Some(command) = &self.guest.main
            && self.saved.is_none()
        {
            self.start_main(command);
        }
        self.mark(trace::MARK_AGENT_READY);
        let mut attempt = 0;
        if self.script.redials {
            let given_up = self.call_supervisor().unwrap();
            spawn(self, |vm| vm.say_hello_late(given_up));
        }
        loop {
            if let Ok(stream) = self.call_supervisor() {
                let _ = self.supervise(stream, attempt);
                attempt += 1;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// A connection to the node, as a VMM gets it for its guest.
    pub fn call_supervisor(&self) -> io::Result<UnixStream> {
        let vsock = &self.config.vsock.as_ref().unwrap().path;
        let socket = dial::socket_of_port(vsock, SUPERVISOR_PORT);
        let stream = match handed::take(&socket) {
            Some(ahead) => UnixStream::from(ahead),
            None => {
                let mut dialer = self.dialer.lock().unwrap();
                let dialer = dialer.get_or_insert_with(|| Dialer::new(vsock));
                match dialer.is_by_name() {
                    true => dial::connect(&socket)?,
                    false => called(dialer)?,
                }
            }
        };
        stream.set_nonblocking(false)?;
        Ok(stream)
    }

    /// The node ignores a hello that arrives after that of a later connection.
    fn say_hello_late(&self, mut given_up: UnixStream) {
        let mut main = self.main.lock().unwrap();
        while main.program.is_none() || !main.welcomed {
            main = self.changed.wait(main).unwrap();
        }
        drop(main);
        let hello = FromGuest::Hello {
            version: VERSION,
            vm_id: self.config.id.clone(),
            pid1_ns: 5_000_000,
            attempt: 0,
        };
        send(&mut given_up, &hello).unwrap();
        let heard = given_up.read(&mut [0; 64]);
        if !matches!(heard, Ok(0)) {
            self.finish(ExitReason::GuestFault, "A hello came late and was welcome.");
        }
        self.main.lock().unwrap().was_late = true;
        self.changed.notify_all();
    }

    /// Data that a hostile program in the guest might send.
    pub fn garbage(&self) {
        let hello = |vm_id: &str, version| {
            frame::to_vec(&FromGuest::Hello {
                version,
                vm_id: vm_id.into(),
                pid1_ns: 0,
                attempt: 0,
            })
            .unwrap()
        };
        for bytes in [
            vec![0xff; 4096],
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            hello("ffffffffffff", VERSION),
            hello(&self.config.id, 0),
            frame::to_vec(&FromGuest::MainExited(ExitStatus::Code(99))).unwrap(),
        ] {
            let mut stream = self.call_supervisor().unwrap();
            let _ = stream.write_all(&bytes);
            let _ = stream.read_to_end(&mut Vec::new());
        }
    }

    pub fn start_main(self: &Arc<Vm>, command: &Command) {
        match start(command) {
            Ok(mut child) => {
                self.mark(trace::MARK_COMMAND_STARTED);
                let streams: [Box<dyn Read + Send>; 2] = [
                    Box::new(child.stdout.take().unwrap()),
                    Box::new(child.stderr.take().unwrap()),
                ];
                let mut main = self.main.lock().unwrap();
                let program = Program::of(&child);
                main.program = Some(Arc::clone(&program));
                let (input, queue) = mpsc::channel();
                main.input = Some(input);
                drop(main);
                let mut stdin = child.stdin.take();
                let waited = Arc::clone(&program);
                spawn(self, move |vm| {
                    for message in queue {
                        let bytes = match &message {
                            ExecInput::Stdin(bytes) => bytes.len() as u32,
                            _ => 0,
                        };
                        feed(message, &program, &mut stdin);
                        vm.main.lock().unwrap().taken += bytes;
                        vm.changed.notify_all();
                    }
                });
                let readers: Vec<_> = streams
                    .into_iter()
                    .enumerate()
                    .map(|(index, stream)| {
                        let vm = Arc::clone(self);
                        thread::spawn(move || vm.read_main(index, stream))
                    })
                    .collect();
                spawn(self, move |vm| {
                    for reader in readers {
                        reader.join().unwrap();
                    }
                    let status = waited.wait(&mut child);
                    vm.mark(trace::MARK_COMMAND_DONE);
                    vm.main.lock().unwrap().exit = Some(status);
                    vm.changed.notify_all();
                });
            }
            Err(error) => self.main.lock().unwrap().failed = Some(error),
        }
    }

    pub fn read_main(&self, index: usize, mut stream: Box<dyn Read + Send>) {
        let mut buffer = vec![0; MAX_DATA];
        loop {
            let mut main = self.main.lock().unwrap();
            while main.output[index].bytes.len() >= MAIN_OUTPUT_WINDOW {
                main = self.changed.wait(main).unwrap();
            }
            let room = MAIN_OUTPUT_WINDOW - main.output[index].bytes.len();
            drop(main);
            let limit = room.min(buffer.len());
            match stream.read(&mut buffer[..limit]) {
                Ok(0) | Err(_) => return,
                Ok(got) => {
                    let mut main = self.main.lock().unwrap();
                    main.output[index].bytes.extend_from_slice(&buffer[..got]);
                    self.changed.notify_all();
                }
            }
        }
    }

    pub fn supervise(self: &Arc<Vm>, mut stream: UnixStream, attempt: u32) -> io::Result<()> {
        send(
            &mut stream,
            &FromGuest::Hello {
                version: VERSION + u16::from(self.script.newer),
                vm_id: self.config.id.clone(),
                pid1_ns: 5_000_000,
                attempt,
            },
        )?;
        let mut reader = Messages::new(stream.try_clone()?);
        let Some(ToGuest::Welcome {
            version: VERSION,
            stdout_offset,
            stderr_offset,
        }) = reader.next()?
        else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let mut main = self.main.lock().unwrap();
        (main.broken, main.told_end, main.welcomed) = (false, false, true);
        self.changed.notify_all();
        for (window, offset) in main.output.iter_mut().zip([stdout_offset, stderr_offset]) {
            window.forget(offset);
            window.sent = window.base;
        }
        drop(main);
        spawn(self, move |vm| vm.hear(reader));
        send(
            &mut stream,
            &FromGuest::Spans(vec![GuestSpan {
                kernel: false,
                name: "mount root".into(),
                start_ns: 6_000_000,
                end_ns: 7_000_000,
                error: None,
            }]),
        )?;
        if self.script.warn && attempt == 0 {
            send(
                &mut stream,
                &FromGuest::Warning {
                    step: "hostname".into(),
                    message: "it would not stick".into(),
                },
            )?;
            send(
                &mut stream,
                &FromGuest::ServiceLog {
                    name: "crond".into(),
                    line: b"tick".to_vec(),
                },
            )?;
        }
        send(&mut stream, &FromGuest::Ready)?;
        if self.script.slow_report || (self.script.redials && attempt > 0) {
            thread::sleep(SLOW);
        }
        let over = self.report_main(&mut stream, attempt);
        let _ = stream.shutdown(Shutdown::Both);
        over
    }

    /// Reports the first command until the connection breaks.
    pub fn report_main(&self, stream: &mut UnixStream, attempt: u32) -> io::Result<()> {
        let mut main = self.main.lock().unwrap();
        let mut told_start = false;
        main.taken = 0;
        main.told_taken = 0;
        send(
            stream,
            &FromGuest::MainInputRoom {
                bytes: INPUT_WINDOW as u32,
            },
        )?;
        loop {
            if main.broken {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if main.taken > 0 {
                let bytes = std::mem::take(&mut main.taken);
                main.told_taken += bytes;
                send(stream, &FromGuest::MainInputRoom { bytes })?;
            }
            if !told_start && let Some(pid) = main.program.as_ref().map(|program| program.pid) {
                told_start = true;
                send(stream, &FromGuest::MainStarted { pid })?;
                if self.script.crash {
                    self.finish(ExitReason::GuestFault, "The guest crashed: triple fault.");
                }
                if self.script.early_off {
                    self.finish(ExitReason::Shutdown, "The guest powered off.");
                }
            }
            if !main.told_end
                && let Some(error) = main.failed.clone()
            {
                main.told_end = true;
                send(stream, &FromGuest::MainFailed(error))?;
            }
            let mut all_sent = true;
            for (window, name) in main.output.iter_mut().zip([Stream::Stdout, Stream::Stderr]) {
                if let Some((offset, data)) = window.next() {
                    send(
                        stream,
                        &FromGuest::MainOutput {
                            stream: name,
                            offset,
                            data,
                        },
                    )?;
                    all_sent = false;
                }
            }
            if !all_sent {
                continue;
            }
            if !main.told_end
                && let Some(status) = main.exit
            {
                main.told_end = true;
                send(stream, &FromGuest::MainExited(status))?;
            }
            if self.script.redials && attempt == 0 && !(main.end_stored && main.was_late) {
                main = self.changed.wait(main).unwrap();
                continue;
            }
            if self.script.redials && attempt == 0 {
                // Pretends that the message was lost.
                main.end_stored = false;
                return Ok(());
            }
            let over = main.end_stored && self.guest.power_off_after_main;
            if over || main.powering_off && (main.exit.is_none() || main.told_end) {
                send(stream, &FromGuest::PoweringOff)?;
                drop(main);
                if self.script.slow_off {
                    std::fs::write(OFF, "")?;
                    wait_for_release();
                    std::fs::write("written", "")?;
                }
                thread::sleep(Duration::from_millis(5));
                while self.script.end_at_pause && *self.paused.lock().unwrap() {
                    thread::sleep(Duration::from_millis(2));
                }
                self.finish(ExitReason::Shutdown, "The guest powered off.");
            }
            main = self.changed.wait(main).unwrap();
        }
    }

    /// Reads the node's messages on a supervisor connection.
    pub fn hear(&self, mut reader: Messages) {
        let mut waiting = 0usize;
        while let Ok(Some(message)) = reader.next::<ToGuest>() {
            let mut main = self.main.lock().unwrap();
            waiting -= std::mem::take(&mut main.told_taken) as usize;
            match message {
                ToGuest::Welcome { .. } => panic!("one welcome is enough"),
                ToGuest::MainOutputStored {
                    stdout_offset,
                    stderr_offset,
                } => {
                    main.output[0].forget(stdout_offset);
                    main.output[1].forget(stderr_offset);
                }
                ToGuest::MainInput(message) => {
                    if let ExecInput::Stdin(bytes) = &message {
                        waiting += bytes.len();
                        assert!(waiting <= INPUT_WINDOW, "more input than there is room for");
                    }
                    // Signals overtake waiting input.
                    match (&message, &main.program) {
                        (ExecInput::Signal(_), Some(program)) => feed(message, program, &mut None),
                        _ => drop(main.input.as_ref().map(|input| input.send(message))),
                    }
                }
                ToGuest::MainEndStored => main.end_stored |= main.told_end,
            }
            self.changed.notify_all();
        }
        self.main.lock().unwrap().broken = true;
        self.changed.notify_all();
    }

    pub fn kill_main(&self, signal: Signal) {
        let main = self.main.lock().unwrap();
        if let Some(program) = &main.program {
            program.signal(signal);
        }
    }
}

impl Window {
    fn forget(&mut self, until: u64) {
        // May exceed what was sent here, if other programs in the guest sent more.
        let count = until.saturating_sub(self.base);
        self.bytes.drain(..self.bytes.len().min(count as usize));
        self.base += count;
        self.sent = self.sent.max(self.base);
    }

    fn next(&mut self) -> Option<(u64, Vec<u8>)> {
        let from = (self.sent - self.base) as usize;
        let data: Vec<u8> = self.bytes[from..].iter().take(MAX_DATA).copied().collect();
        let offset = self.sent;
        self.sent += data.len() as u64;
        (!data.is_empty()).then_some((offset, data))
    }
}

/// Asks the node for a connection, and waits for it.
fn called(dialer: &mut Dialer) -> io::Result<UnixStream> {
    dialer.ask(SUPERVISOR_PORT)?;
    loop {
        match dialer.answer()? {
            Some(answer) => return answer,
            None => thread::sleep(Duration::from_millis(1)),
        }
    }
}
