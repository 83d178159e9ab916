//! Hostile programs in the guest that flood the supervisor port.

use crate::channel::{Messages, send};
use crate::{Vm, spawn, wait_for_release};
use jiffy_wire::agent::{FromGuest, GuestSpan, Stream, ToGuest, VERSION};
use jiffy_wire::frame::MAX_DATA;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Number of programs that send hellos at a time.
const TALKERS: usize = 12;
/// Number of silent connections.
const SILENT: usize = 100;
/// The file that shows that all of these are open.
const OPEN: &str = "silent";

impl Vm {
    pub fn storm(self: &Arc<Vm>) {
        for _ in 0..TALKERS {
            spawn(self, |vm| {
                while !Path::new("go").exists() {
                    let _ = vm.talk();
                }
            });
        }
        wait_for_release();
        let mut silent = Vec::new();
        while silent.len() < SILENT {
            match self.call_supervisor() {
                Ok(stream) => silent.push(stream),
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
        std::fs::write(OPEN, "").unwrap();
        for mut stream in silent {
            let _ = stream.read(&mut [0]);
        }
    }

    /// Sends a valid hello, then data until the connection is closed.
    fn talk(&self) -> io::Result<()> {
        let mut stream = self.call_supervisor()?;
        let hello = FromGuest::Hello {
            version: VERSION,
            vm_id: self.config.id.clone(),
            pid1_ns: 5_000_000,
            attempt: 7,
        };
        send(&mut stream, &hello)?;
        let mut reader = Messages::new(stream.try_clone()?);
        let Some(ToGuest::Welcome {
            stdout_offset: mut offset,
            ..
        }) = reader.next()?
        else {
            return Ok(());
        };
        // From here on it reads no acknowledgements.
        loop {
            let data = vec![b'x'; MAX_DATA];
            let length = data.len() as u64;
            let output = FromGuest::MainOutput {
                stream: Stream::Stdout,
                offset,
                data,
            };
            offset += length;
            let spans = vec![
                GuestSpan {
                    kernel: true,
                    name: "s".repeat(100),
                    start_ns: 1,
                    end_ns: 2,
                    error: Some("e".repeat(100)),
                };
                200
            ];
            let warning = FromGuest::Warning {
                step: "w".repeat(1000),
                message: "m".repeat(20_000),
            };
            let log = FromGuest::ServiceLog {
                name: "n".repeat(1000),
                line: vec![0xff; 20_000],
            };
            for message in [
                hello.clone(),
                output,
                FromGuest::Spans(spans),
                warning,
                log,
                FromGuest::MainInputRoom { bytes: u32::MAX },
                FromGuest::Ready,
                FromGuest::MainStarted { pid: 1 },
            ] {
                send(&mut stream, &message)?;
            }
        }
    }
}
