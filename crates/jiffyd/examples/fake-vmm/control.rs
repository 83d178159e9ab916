//! The control socket.

use crate::Vm;
use jiffy_sys::{dial, handed};
use jiffy_wire::lines;
use jiffy_wire::vmm::{
    BalloonStatus, ControlRequest, ControlResponse, ExitReason, Extent, ReadUnits,
};
use rustix::process::Signal;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

impl Vm {
    pub fn control(self: &Arc<Vm>, mut stream: UnixStream) -> io::Result<()> {
        let mut line = String::new();
        BufReader::new(stream.try_clone()?).read_line(&mut line)?;
        if self.script.deaf {
            thread::park();
        }
        let request: ControlRequest = serde_json::from_str(&line)?;
        let response = match request {
            ControlRequest::Status => ControlResponse::Status {
                id: self.config.id.clone(),
                pid: std::process::id(),
                paused: *self.paused.lock().unwrap(),
            },
            ControlRequest::Dial { socket } => {
                stream.write_all(b"\"ok\"\n")?;
                stream.set_nonblocking(true)?;
                handed::replace(dial::channel_of(&socket), stream.into());
                return Ok(());
            }
            ControlRequest::Capture { resume } => return self.capture(&mut stream, resume),
            ControlRequest::Pause => self.pause(true),
            ControlRequest::Resume => self.pause(false),
            ControlRequest::SetBalloon { target_mib } => {
                *self.balloon.lock().unwrap() = target_mib;
                self.balloon()
            }
            ControlRequest::Balloon => self.balloon(),
            ControlRequest::SetMemory { usable_mib } => {
                eprintln!("fake-vmm: {usable_mib} MiB are usable");
                let mut memory = self.memory.lock().unwrap();
                memory.usable_mib = usable_mib;
                if !self.script.keeps_memory {
                    memory.used_mib = usable_mib;
                }
                ControlResponse::Memory(*memory)
            }
            ControlRequest::Memory => ControlResponse::Memory(*self.memory.lock().unwrap()),
            ControlRequest::SetLimits { .. } => {
                eprintln!("fake-vmm: {}", line.trim_end());
                ControlResponse::Ok
            }
            ControlRequest::CpuProfile => {
                ControlResponse::CpuProfile(Box::new(crate::host().shown))
            }
            ControlRequest::Reads => ControlResponse::Reads(ReadUnits {
                unit: 16 << 10,
                rows: vec![(3, 2), (0, 1)],
            }),
            ControlRequest::Written => ControlResponse::Written(vec![Extent {
                offset: 1 << 20,
                length: 4096,
            }]),
            _ => ControlResponse::Ok,
        };
        let answer = lines::encode(&response)?;
        stream.write_all(&answer)?;
        if request == ControlRequest::Stop {
            self.kill_main(Signal::KILL);
            self.finish(ExitReason::Stopped, "Stopped.");
        }
        Ok(())
    }

    pub fn balloon(&self) -> ControlResponse {
        let target = *self.balloon.lock().unwrap();
        ControlResponse::Balloon(BalloonStatus {
            target_mib: target,
            actual_mib: target,
            ..BalloonStatus::default()
        })
    }

    /// The programs are stopped in place of vCPUs.
    pub fn pause(&self, paused: bool) -> ControlResponse {
        let refusals = || self.refused.fetch_add(1, Ordering::Relaxed);
        if self.script.resume_fails && !paused && refusals() < 2 {
            return ControlResponse::Error("not now".into());
        }
        *self.paused.lock().unwrap() = paused;
        if self.script.end_at_pause && paused {
            self.kill_main(Signal::TERM);
            let mut main = self.main.lock().unwrap();
            while !main.end_stored {
                main = self.changed.wait(main).unwrap();
            }
        }
        self.kill_main(match paused {
            true => Signal::STOP,
            false => Signal::CONT,
        });
        ControlResponse::Ok
    }
}
