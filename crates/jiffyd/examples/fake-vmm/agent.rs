//! The agent in the guest.

use crate::Vm;
use crate::channel::{Messages, send};
use crate::guest::OFF;
use crate::program::{Program, feed, start};
use jiffy_wire::agent::{
    AGENT_PORT, Command, CopyDone, CopyFrame, Done, ExecInput, ExecOutput, Request, Stat, Stream,
};
use jiffy_wire::frame::{self, MAX_DATA};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

impl Vm {
    pub fn vsock(self: &Arc<Vm>, mut stream: UnixStream) -> io::Result<()> {
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            line.push(byte[0]);
        }
        if self.script.deaf || Path::new(OFF).exists() {
            return Ok(());
        }
        // A guest without vCPUs answers when it has them again.
        while *self.paused.lock().unwrap() {
            thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(line, format!("CONNECT {AGENT_PORT}\n").as_bytes());
        stream.write_all(b"OK 4000\n")?;
        let mut reader = Messages::new(stream.try_clone()?);
        let Some(request) = reader.next::<Request>()? else {
            return Ok(());
        };
        // The init of release 0.1 closes the connection on any other request.
        if self.script.old && request.version() > 1 {
            return Ok(());
        }
        if self.script.hung_agent {
            while reader.next::<ExecInput>()?.is_some() {}
            return Ok(());
        }
        match request {
            Request::Exec { command, .. } => self.exec(stream, reader, &command),
            Request::Stat { .. } => send(&mut stream, &self.stat()),
            Request::SignalMain { signal, .. } => {
                self.kill_main(Signal::from_named_raw(signal).unwrap());
                send(&mut stream, &Done::Ok)
            }
            Request::Quiesce { .. } => self.quiesce(stream, reader),
            Request::SetCpus { count, .. } => {
                eprintln!("{count} vCPUs are online");
                send(&mut stream, &Done::Ok)
            }
            Request::Shutdown { grace_ms, .. } => {
                send(&mut stream, &Done::Ok)?;
                self.kill_main(Signal::TERM);
                let until = Instant::now() + Duration::from_millis(grace_ms.into());
                let runs = || {
                    let main = self.main.lock().unwrap();
                    main.program.is_some() && main.exit.is_none()
                };
                while runs() && Instant::now() < until {
                    thread::sleep(Duration::from_millis(5));
                }
                self.kill_main(Signal::KILL);
                while runs() {
                    thread::sleep(Duration::from_millis(5));
                }
                self.main.lock().unwrap().powering_off = true;
                self.changed.notify_all();
                Ok(())
            }
            Request::CopyIn { path, .. } => {
                let mut frames = Vec::new();
                loop {
                    match reader.next::<CopyFrame>()? {
                        Some(CopyFrame::End) => break,
                        Some(frame) => frames.push(frame),
                        None => return Ok(()),
                    }
                }
                let entries = frames.len() as u64;
                self.copied.lock().unwrap().insert(path, frames);
                send(
                    &mut stream,
                    &CopyDone {
                        entries,
                        error: None,
                    },
                )
            }
            Request::Changes { .. } => {
                let mut tar = tar::Builder::new(Vec::new());
                let mut header = tar::Header::new_ustar();
                header.set_size(7);
                header.set_mode(0o644);
                header.set_uid(0);
                header.set_gid(0);
                header.set_mtime(0);
                tar.append_data(&mut header, "changed", &b"by a VM"[..])
                    .unwrap();
                let tar = tar.into_inner().unwrap();
                send(&mut stream, &CopyFrame::Data(tar))?;
                send(&mut stream, &CopyFrame::End)
            }
            Request::CopyOut { path, .. } => {
                let frames = self.copied.lock().unwrap().get(&path).cloned();
                let Some(frames) = frames else {
                    let message = format!("{path} does not exist");
                    return send(&mut stream, &CopyFrame::Failed { message });
                };
                for frame in &frames {
                    send(&mut stream, frame)?;
                }
                send(&mut stream, &CopyFrame::End)
            }
        }
    }

    fn stat(&self) -> Stat {
        let total = u64::from(self.config.memory.size_mib) << 20;
        let (available, free) = match (self.script.caches, self.script.spare_memory) {
            (true, _) => (100 << 20, 20 << 20),
            (false, true) => (total, total),
            (false, false) => (0, 0),
        };
        Stat {
            memory_total: total,
            memory_available: available,
            memory_free: free,
            uptime_ns: self.begun.elapsed().as_nanos() as u64,
            ..Stat::default()
        }
    }

    pub fn exec(
        &self,
        stream: UnixStream,
        mut input: Messages,
        command: &Command,
    ) -> io::Result<()> {
        let mut to_host = stream.try_clone()?;
        if self.script.exec_garbage {
            to_host.write_all(&[0xee; 300])?;
            return Ok(());
        }
        let mut child = match start(command) {
            Ok(child) => child,
            Err(error) => return send(&mut to_host, &ExecOutput::Failed(error)),
        };
        let program = Program::of(&child);
        let pid = program.pid;
        send(&mut to_host, &ExecOutput::Started { pid })?;
        if self.script.die_in_message {
            let whole = frame::to_vec(&ExecOutput::Output {
                stream: Stream::Stdout,
                data: vec![b'x'; 5000],
            })
            .unwrap();
            to_host.write_all(&whole[..3000])?;
            thread::sleep(Duration::from_millis(50));
            program.signal(Signal::KILL);
            let me = Pid::from_raw(std::process::id() as i32).unwrap();
            let _ = kill_process(me, Signal::KILL);
        }
        let shared = Arc::new(Mutex::new(to_host));
        let streams: [(Stream, Box<dyn Read + Send>); 2] = [
            (Stream::Stdout, Box::new(child.stdout.take().unwrap())),
            (Stream::Stderr, Box::new(child.stderr.take().unwrap())),
        ];
        let readers: Vec<_> = streams
            .into_iter()
            .map(|(name, mut from)| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let mut buffer = vec![0; MAX_DATA];
                    while let Ok(got @ 1..) = from.read(&mut buffer) {
                        let message = ExecOutput::Output {
                            stream: name,
                            data: buffer[..got].to_vec(),
                        };
                        if send(&mut shared.lock().unwrap(), &message).is_err() {
                            return;
                        }
                    }
                })
            })
            .collect();
        let mut stdin = child.stdin.take();
        let fed = Arc::clone(&program);
        thread::spawn(move || {
            while let Ok(Some(message)) = input.next::<ExecInput>() {
                feed(message, &fed, &mut stdin);
            }
            fed.signal(Signal::HUP);
        });
        for reader in readers {
            reader.join().unwrap();
        }
        let status = program.wait(&mut child);
        send(&mut shared.lock().unwrap(), &ExecOutput::Exited(status))?;
        stream.shutdown(Shutdown::Both)
    }

    /// Programs are frozen until the connection ends.
    pub fn quiesce(&self, mut stream: UnixStream, mut reader: Messages) -> io::Result<()> {
        self.kill_main(Signal::STOP);
        // Output that was written is delivered first.
        thread::sleep(Duration::from_millis(20));
        // The node waits for 60 s.
        let until = Instant::now() + Duration::from_secs(50);
        loop {
            let main = self.main.lock().unwrap();
            if main.output.iter().all(|window| window.bytes.is_empty()) {
                break;
            }
            drop(main);
            assert!(Instant::now() < until, "the output is never acknowledged");
            thread::sleep(Duration::from_millis(2));
        }
        send(&mut stream, &Done::Ok)?;
        let _ = reader.next::<Request>();
        if !*self.paused.lock().unwrap() {
            self.kill_main(Signal::CONT);
        }
        Ok(())
    }
}
