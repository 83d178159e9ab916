//! The main thread while the guest runs: it serves the control socket, feeds the console, starts
//! device threads, and waits for the end.

use crate::capture::Capture;
use crate::config;
use crate::control::{Answer, ControlSocket};
use crate::devices::Devices;
use crate::ending::Ending;
use crate::error::{StartError, sentence};
use crate::poll::{readable, timespec};
use crate::sandbox::violation;
use crate::vmm::Vmm;
use jiffy_devices::serial::Serial;
use jiffy_sys::mutex::lock;
use jiffy_sys::termination::TerminationFd;
use jiffy_sys::{activity, handed};
use jiffy_wire::vmm::{ControlRequest, ControlResponse, ExitReason};
use rustix::event::{PollFd, PollFlags, poll};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Mutex, TryLockError};
use std::time::Duration;
use vmm_sys_util::eventfd::EventFd;

/// How often a port that a vCPU has locked is tried again.
const RETRY: Duration = Duration::from_millis(20);

/// Runs the started VM to its end. `config` is the file it was started with.
pub fn watch(
    vmm: &mut Vmm,
    config: &Path,
    termination: &TerminationFd,
    control: &mut Option<ControlSocket>,
    mut console: Option<ConsoleInput>,
) -> Ending {
    loop {
        if let Some(ending) = vmm.process_events() {
            return ending;
        }
        let ready = match wait(vmm, termination, control.as_ref(), console.as_ref()) {
            Ok(ready) => ready,
            Err(error) => {
                return Ending {
                    reason: ExitReason::HostError,
                    message: format!("waiting for events failed: {error}"),
                };
            }
        };
        if let Some(violation) = violation::first() {
            return Ending {
                reason: ExitReason::HostError,
                message: format!(
                    "thread {} of the VMM made system call {}, which its sandbox forbids",
                    violation.thread, violation.call
                ),
            };
        }
        if ready.terminate {
            return stopped("by a signal");
        }
        if ready.console
            && let Some(input) = &mut console
            && !input.feed()
        {
            console = None;
        }
        if ready.control
            && let Some(control) = control
        {
            let mut stop = false;
            control.serve(|request| answer(vmm, config, request, &mut stop));
            if stop {
                return stopped("over the control socket");
            }
            // All answers were sent before this point.
            vmm.prepare_captures();
        }
    }
}

#[derive(Debug, Default)]
struct Ready {
    terminate: bool,
    control: bool,
    console: bool,
}

fn wait(
    vmm: &Vmm,
    termination: &TerminationFd,
    control: Option<&ControlSocket>,
    console: Option<&ConsoleInput>,
) -> io::Result<Ready> {
    let events = vmm.events();
    let stdin = io::stdin();
    let mut wait = vec![PollFd::new(termination, PollFlags::IN)];
    wait.extend(events.iter().map(|event| readable(event)));
    wait.extend(violation::wakeup().map(readable));
    wait.extend(
        vmm.pager()
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)),
    );
    // The console waits for more input, or, while the guest's port is full, for space.
    let console_at = wait.len();
    if let Some(console) = console {
        wait.push(match console.kept.is_empty() {
            true => PollFd::new(&stdin, PollFlags::IN),
            false => readable(&console.drained),
        });
    }
    let control_at = wait.len();
    if let Some(control) = control {
        let clients = control.descriptors();
        wait.extend(clients.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
    }
    let busy = console.is_some_and(|console| console.busy);
    let retry = busy.then_some(RETRY);
    let timeout = vmm.timeout().into_iter().chain(retry).min().map(timespec);
    match activity::wait("serves", || poll(&mut wait, timeout.as_ref())) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok(Ready::default()),
        Err(error) => return Err(error.into()),
    }
    let any = |polled: &[PollFd<'_>]| polled.iter().any(|fd| !fd.revents().is_empty());
    Ok(Ready {
        terminate: any(&wait[..1]),
        console: busy || any(&wait[console_at..control_at]),
        control: any(&wait[control_at..]),
    })
}

fn answer(vmm: &mut Vmm, config: &Path, request: ControlRequest, stop: &mut bool) -> Answer {
    let response = match request {
        ControlRequest::Status => ControlResponse::Status {
            id: vmm.id().to_owned(),
            pid: std::process::id(),
            paused: vmm.is_paused(),
        },
        ControlRequest::Pause => {
            vmm.pause();
            ControlResponse::Ok
        }
        ControlRequest::Resume => {
            vmm.resume();
            ControlResponse::Ok
        }
        ControlRequest::Begin if !vmm.is_held() => {
            ControlResponse::Error("this VM has begun already".into())
        }
        ControlRequest::Begin => match begin(vmm, config) {
            Ok(()) => ControlResponse::Ok,
            Err(error) => {
                let why = sentence(&error);
                // A held VM that can't begin is of no use.
                vmm.fail(format!("the VM could not begin: {why}"));
                ControlResponse::Error(why)
            }
        },
        ControlRequest::Stop => {
            *stop = true;
            ControlResponse::Ok
        }
        ControlRequest::Stats => match vmm.stats() {
            Ok(stats) => ControlResponse::Stats(stats),
            Err(error) => {
                ControlResponse::Error(format!("KVM's statistics can't be read: {error}"))
            }
        },
        ControlRequest::Capture { resume } => match vmm.capture(resume) {
            Ok(capture) => return captured(capture),
            Err(error) => ControlResponse::Error(sentence(&error)),
        },
        ControlRequest::Written => match vmm.written() {
            Ok(extents) => ControlResponse::Written(extents),
            Err(error) => {
                ControlResponse::Error(format!("the written pages can't be listed: {error}"))
            }
        },
        ControlRequest::CpuProfile => match vmm.cpu_profile() {
            Some(profile) => ControlResponse::CpuProfile(Box::new(profile.clone())),
            None => ControlResponse::Error("this VM was not captured yet".to_owned()),
        },
        ControlRequest::Reads => match vmm.devices().reads() {
            Some(reads) => ControlResponse::Reads(reads),
            None => ControlResponse::Error("the reads of no disk are noted".to_owned()),
        },
        ControlRequest::SetBalloon { target_mib } => {
            match vmm.with_devices(move |devices| devices.set_balloon(target_mib)) {
                Some(Some(Err(error))) => ControlResponse::Error(error.to_string()),
                _ => balloon(vmm),
            }
        }
        ControlRequest::Balloon => balloon(vmm),
        ControlRequest::SetMemory { usable_mib } => {
            match vmm.with_devices(move |devices| devices.set_usable_memory(usable_mib)) {
                Some(Some(Err(error))) => ControlResponse::Error(error.to_string()),
                _ => usable_memory(vmm),
            }
        }
        ControlRequest::Memory => usable_memory(vmm),
        ControlRequest::SetLimits { disks, nets } => {
            match vmm.with_devices(move |devices| devices.set_limits(&disks, &nets)) {
                Some(Ok(())) => ControlResponse::Ok,
                Some(Err(error)) => ControlResponse::Error(error.to_string()),
                None => memory_is_lost(),
            }
        }
        ControlRequest::Dial { .. } if !handed::is_used() => {
            ControlResponse::Error("this VMM connects by name".into())
        }
        ControlRequest::Dial { socket } => {
            return Answer {
                channel_to: Some(socket),
                ..ControlResponse::Ok.into()
            };
        }
    };
    response.into()
}

fn begin(vmm: &mut Vmm, config: &Path) -> Result<(), StartError> {
    let config = config::read(config)?;
    if config.record_activity {
        activity::record();
    }
    vmm.begin(&config)
}

fn balloon(vmm: &mut Vmm) -> ControlResponse {
    match vmm.with_devices(Devices::balloon) {
        Some(Some(status)) => ControlResponse::Balloon(status),
        Some(None) => ControlResponse::Error("this VM has no balloon".into()),
        None => memory_is_lost(),
    }
}

fn usable_memory(vmm: &mut Vmm) -> ControlResponse {
    match vmm.with_devices(Devices::usable_memory) {
        Some(Some(status)) => ControlResponse::Memory(status),
        Some(None) => ControlResponse::Error("this VM's memory can't change".into()),
        None => memory_is_lost(),
    }
}

fn memory_is_lost() -> ControlResponse {
    ControlResponse::Error("this VM's memory is lost".into())
}

fn captured(capture: Capture) -> Answer {
    let response = ControlResponse::Captured {
        layers: capture.layers.len() as u32,
        pause_ns: capture.pause_ns,
        copied_bytes: capture.copied_bytes,
    };
    let mut files = vec![Arc::new(capture.state), Arc::new(capture.layout)];
    files.extend(capture.layers);
    Answer {
        files,
        ..response.into()
    }
}

fn stopped(how: &str) -> Ending {
    Ending {
        reason: ExitReason::Stopped,
        message: format!("the VM was stopped {how}"),
    }
}

/// Moves bytes from stdin to COM1.
pub struct ConsoleInput {
    serial: Arc<Mutex<Serial>>,
    /// Signalled when the port has space.
    drained: EventFd,
    kept: Vec<u8>,
    /// A vCPU has locked the port: it writes to stdout, whose reader may be slow.
    busy: bool,
}

impl ConsoleInput {
    /// Input for this port. Must be called before vCPUs run, because it waits for the port's lock.
    ///
    /// # Errors
    ///
    /// If the event descriptor can't be duplicated.
    pub fn new(serial: Arc<Mutex<Serial>>) -> io::Result<ConsoleInput> {
        let port = lock(&serial);
        let drained = port.drained().try_clone()?;
        drop(port);
        Ok(ConsoleInput {
            serial,
            drained,
            kept: Vec::new(),
            busy: false,
        })
    }

    /// Moves as many bytes as are available and fit; false at the end of the input.
    fn feed(&mut self) -> bool {
        let _ = self.drained.read();
        if self.kept.is_empty() {
            let mut bytes = [0; 256];
            match rustix::io::read(io::stdin().as_fd(), &mut bytes) {
                Ok(0) => return false,
                Ok(count) => self.kept.extend_from_slice(&bytes[..count]),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => return true,
                Err(_) => return false,
            }
        }
        // The main thread must not wait for a vCPU, because it also serves the control socket.
        let mut serial = match self.serial.try_lock() {
            Ok(serial) => serial,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.busy = true;
                return true;
            }
        };
        self.busy = false;
        let taken = serial.input(&self.kept);
        self.kept.drain(..taken);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    #[test]
    fn console_input_does_not_wait_for_a_writing_vcpu() {
        let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        let serial = Serial::new(interrupt, Box::new(io::sink())).unwrap();
        let serial = Arc::new(Mutex::new(serial));
        let mut input = ConsoleInput::new(serial.clone()).unwrap();
        input.kept = b"ls".to_vec();
        let written_by_a_vcpu = serial.lock().unwrap();
        assert!(input.feed());
        assert!(input.busy && input.kept == b"ls");
        drop(written_by_a_vcpu);
        assert!(input.feed());
        assert!(!input.busy && input.kept.is_empty());
    }
}
