//! A built VM: start, pause, save, resume, end.
//!
//! * [`phase`]: the phases of a VM's life.

mod phase;

use crate::boot::calls::{self, TscClock};
use crate::boot::{OpenFile, elf};
use crate::capture::{Capture, SaveError};
use crate::cpu::profile;
use crate::devices::{Devices, fw_cfg};
use crate::ending::Ending;
use crate::error::StartError;
use crate::events::Events;
use crate::gate::Gate;
use crate::hypervisor::{Hypervisor, HypervisorError};
use crate::irq::ChipsState;
use crate::mailbox::{Mailbox, Notice};
use crate::memory::{GuestRam, MemoryError, RamAhead};
use crate::pager::{Supply, run_off_main};
use crate::poll::{readable, timespec};
use crate::restore;
use crate::sandbox::{Role, Sandbox, violation};
use crate::state::VmState;
use crate::stats::StatsFile;
use crate::vcpu::thread::VcpuThread;
use crate::vcpu::{Vcpu, VcpuState};
use crate::workers::ThreadStarter;
use jiffy_devices::power::PowerRequest;
use jiffy_sys::clock;
use jiffy_wire::cpu::Profile;
use jiffy_wire::guest::GENERATION_NAME;
use jiffy_wire::vmm::{ExitReason, Extent, VmmConfig};
use kvm_ioctls::VmFd;
use phase::Phase;
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

/// The guest's "paused" flag is set after a pause of at least this length. Guests' watchdogs have
/// longer timeouts, and captures take less.
const LONG_PAUSE_NS: u64 = 1_000_000_000;
/// When memory that is of no use is freed: after the answer of a short command, which has priority.
const UNUSED_TIME: Duration = Duration::from_millis(50);

/// A VM. Only the thread that built it may call its methods. `phase`, `gate` and `supply` are its state;
/// an `Option` besides is a part that not every VM has.
pub struct Vmm {
    id: String,
    phase: Phase,
    // Threads come first, because they must end before what they use.
    vcpus: Vec<VcpuThread>,
    devices: Arc<Devices>,
    stats: Vec<StatsFile>,
    hypervisor: Hypervisor,
    vm: Arc<VmFd>,
    ram: Arc<GuestRam>,
    mailbox: Arc<Mailbox>,
    workers: Arc<ThreadStarter>,
    events: Arc<Events>,
    sandbox: Sandbox,
    gate: Gate,
    supply: Supply,
    first_entry: FirstEntry,
    /// RAM that was made ahead and is of no use to a restored VM, and when it is freed.
    unused: Option<(RamAhead, Instant)>,
    noted_calls: Option<NotedCalls>,
    /// What the last save found: the profile of its guest's processor.
    profile: Option<Profile>,
}

/// The parts that the builder has made.
pub(crate) struct Parts {
    pub id: String,
    pub vm_stats: Option<StatsFile>,
    pub hypervisor: Hypervisor,
    pub vm: Arc<VmFd>,
    pub ram: Arc<GuestRam>,
    pub vcpus: Vec<Vcpu>,
    pub devices: Devices,
    pub mailbox: Arc<Mailbox>,
    pub workers: Arc<ThreadStarter>,
    pub events: Arc<Events>,
    pub gate: Gate,
    pub supply: Supply,
    pub first_entry: FirstEntry,
    pub unused: Option<RamAhead>,
    pub noted_calls: Option<NotedCalls>,
    pub sandbox: Sandbox,
}

/// What to do when the first vCPU enters the guest for the first time.
pub(crate) struct FirstEntry {
    /// The name of the moment of this entry on the timeline.
    pub moment: &'static str,
    /// Pages that the guest will write first, to be copied at that moment.
    pub first_writes: Vec<Extent>,
}

/// What is needed to report the calls that the kernel notes while it boots.
pub(crate) struct NotedCalls {
    /// The kernel's file, which may have the names of its functions.
    pub kernel: OpenFile,
    /// The guest's time stamp counter.
    pub clock: TscClock,
}

impl Vmm {
    pub(crate) fn new(parts: Parts) -> Vmm {
        let mut vcpus = parts.vcpus;
        let stats = vcpus
            .iter_mut()
            .filter_map(Vcpu::take_stats)
            .chain(parts.vm_stats)
            .collect();
        Vmm {
            id: parts.id,
            vcpus: Vec::with_capacity(vcpus.len()),
            phase: Phase::Built(vcpus),
            devices: Arc::new(parts.devices),
            stats,
            hypervisor: parts.hypervisor,
            vm: parts.vm,
            ram: parts.ram,
            mailbox: parts.mailbox,
            workers: parts.workers,
            events: parts.events,
            sandbox: parts.sandbox,
            gate: parts.gate,
            supply: parts.supply,
            first_entry: parts.first_entry,
            unused: parts.unused.map(|ram| (ram, Instant::now() + UNUSED_TIME)),
            noted_calls: parts.noted_calls,
            profile: None,
        }
    }

    /// Starts the vCPUs' threads. They enter the guest at once, or, if `paused`, wait for
    /// [`resume`](Vmm::resume).
    ///
    /// # Errors
    ///
    /// If memory was lost while the VM was built, or a thread can't be started.
    pub fn start(&mut self, paused: bool) -> Result<(), StartError> {
        let phase = match paused {
            true => Phase::Paused { since_ns: None },
            false => {
                self.devices.resume();
                self.gate.running();
                Phase::Starting
            }
        };
        self.start_vcpus(phase)
    }

    /// Starts everything but the guest, which waits for [`begin`](Vmm::begin).
    ///
    /// # Errors
    ///
    /// As for [`start`](Vmm::start).
    pub fn hold(&mut self) -> Result<(), StartError> {
        self.devices.resume();
        // First, because it reports whether the memory is present that devices will read.
        self.start_vcpus(Phase::Held)?;
        self.workers.start_device_jobs();
        self.events.flush();
        Ok(())
    }

    /// Enters a guest that is held, unless it is paused as well. Only the fw_cfg files, the devices'
    /// limits and the generation of this configuration are used: building the VM has used the rest.
    ///
    /// # Errors
    ///
    /// If a fw_cfg file can't be read or is not valid, or the host can't provide randomness for the
    /// generation. The guest is not entered then.
    pub fn begin(&mut self, config: &VmmConfig) -> Result<(), StartError> {
        self.devices.replace_fw_cfg(fw_cfg::files(config)?)?;
        self.devices.begin_limits(config);
        if let Some(restore) = &config.restore {
            if let Some(generation) = &restore.generation {
                let generation = restore::generation(generation)?;
                self.devices.refresh_fw_cfg(GENERATION_NAME, generation);
            }
            self.gate = Gate::of(restore);
        }
        match self.phase {
            // Its devices are paused, too: resuming it enters the guest.
            Phase::HeldPaused { .. } => self.phase = Phase::Paused { since_ns: None },
            Phase::Held => {
                self.phase = Phase::Running { since_ns: 0 };
                self.vcpus.iter().for_each(VcpuThread::resume);
                self.gate.running();
            }
            _ => {}
        }
        Ok(())
    }

    /// Whether it waits for [`begin`](Vmm::begin).
    pub fn is_held(&self) -> bool {
        self.phase.is_held()
    }

    /// Starts the vCPUs' threads; they enter the guest if `phase` is `Starting`.
    fn start_vcpus(&mut self, phase: Phase) -> Result<(), StartError> {
        let parked = !matches!(phase, Phase::Starting);
        let built = std::mem::replace(&mut self.phase, phase);
        self.supply.take_over()?;
        let Phase::Built(vcpus) = built else {
            return Ok(());
        };
        for vcpu in vcpus {
            let thread = VcpuThread::start(
                vcpu,
                self.devices.board.clone(),
                self.mailbox.clone(),
                parked,
                &self.workers,
            )
            .map_err(|source| StartError::Host {
                what: "a thread for a vCPU",
                source,
            })?;
            self.vcpus.push(thread);
        }
        Ok(())
    }

    /// Waits until the guest has been entered (or can't be), and confines the calling thread.
    ///
    /// # Errors
    ///
    /// If seccomp(2) refuses to confine the thread.
    pub fn settle(&mut self) -> Result<(), StartError> {
        // Handles notices first: the notice that the guest runs may be the last for a long time.
        while self.process_events().is_none()
            && matches!(self.phase, Phase::Starting)
            && !self.is_stuck()
        {
            self.wait_for_threads();
        }
        // Lets the guest run first where both share a processor.
        std::thread::yield_now();
        self.sandbox
            .enter(Role::of_main())
            .map_err(|source| StartError::Host {
                what: "a sandbox",
                source,
            })
    }

    /// Stops all vCPUs, then the devices. From then on nothing changes guest memory.
    pub fn pause(&mut self) {
        if self.phase.is_still() {
            return;
        }
        self.workers.start_device_jobs();
        let since_ns = clock::monotonic_ns();
        self.vcpus.iter().for_each(VcpuThread::pause);
        self.wait_parked();
        if self.is_stuck() {
            return;
        }
        if self.with_devices(Devices::pause).is_some() {
            self.phase.paused(since_ns);
        }
    }

    /// Resumes devices and vCPUs.
    pub fn resume(&mut self) {
        let paused_since_ns = match self.phase {
            Phase::Paused { since_ns } => since_ns,
            Phase::HeldPaused { .. } => None,
            _ => return,
        };
        self.workers.start_device_jobs();
        if self.with_devices(Devices::resume).is_none() || self.phase.ending().is_some() {
            return;
        }
        if self.phase.is_held() {
            self.phase = Phase::Held;
            return;
        }
        // Read before vCPUs resume, because a running guest may delay this thread.
        let since_ns = clock::monotonic_ns();
        self.phase = Phase::Running { since_ns };
        if paused_since_ns.is_some_and(|since| since_ns - since >= LONG_PAUSE_NS) {
            let vcpus = self.vcpus.iter();
            vcpus.for_each(|vcpu| vcpu.send(Vcpu::set_paused_flag));
        }
        self.vcpus.iter().for_each(VcpuThread::resume);
        self.gate.running();
    }

    /// Whether its guest does not run: it is paused or held.
    pub fn is_paused(&self) -> bool {
        self.phase.is_still() || self.phase.is_held()
    }

    /// Saves everything except RAM and disks. The VM stays paused.
    ///
    /// # Errors
    ///
    /// [`SaveError::Running`] if the VM is not paused. Otherwise if a vCPU's thread has ended, KVM
    /// can't tell a part of the state, or a device can't be saved.
    pub fn save(&mut self) -> Result<VmState, SaveError> {
        if !self.phase.is_still() {
            return Err(SaveError::Running);
        }
        self.wait_parked();
        let listed: Arc<[u32]> = self.hypervisor.listed_msrs()?.into();
        let mut vcpus = Vec::with_capacity(self.vcpus.len());
        for (index, vcpu) in self.vcpus.iter().enumerate() {
            let (reply, answer) = sync_channel::<Result<VcpuState, HypervisorError>>(1);
            let listed = listed.clone();
            vcpu.send(move |vcpu| {
                let _ = reply.send(vcpu.save(&listed));
            });
            vcpus.push(answer.recv().map_err(|_| SaveError::VcpuGone(index))??);
        }
        let first = vcpus.first().map(VcpuState::processor);
        self.profile = first.as_ref().map(profile::of_guest);
        Ok(VmState {
            memory_size: self.ram.size(),
            vcpus,
            chips: ChipsState::save(&self.vm, &self.devices.board.pit)?,
            devices: self.devices.save()?,
        })
    }

    /// Pauses the VM, captures its state and its RAM, and, if asked, resumes it. The
    /// captured files never change. A VM that was paused before stays paused.
    ///
    /// # Errors
    ///
    /// If the pager has not filled all memory ([`MemoryError::Incomplete`]), as of
    /// [`save`](Vmm::save), if RAM can't be frozen, or if a memfd can't be created. After
    /// [`MemoryError::Freeze`] the VM ends.
    pub fn capture(&mut self, resume: bool) -> Result<Capture, SaveError> {
        // The node requests a capture only after the pager has reported that memory is complete.
        self.process_events();
        if !self.supply.is_complete() {
            return Err(MemoryError::Incomplete.into());
        }
        let resume = resume && !self.phase.is_still();
        let asked_ns = clock::monotonic_ns();
        self.pause();
        let result = self.save().and_then(|state| {
            let frozen = self.ram.freeze()?;
            Ok((state, frozen))
        });
        // If its RAM may be half frozen, the VM must not continue.
        let lost = matches!(result, Err(SaveError::Memory(MemoryError::Freeze(_))));
        let begun_ns = self.phase.paused_since_ns().unwrap_or(asked_ns);
        if resume && !lost {
            self.resume();
        }
        let until_ns = match self.phase {
            Phase::Running { since_ns } => since_ns,
            _ => clock::monotonic_ns(),
        };
        let pause_ns = until_ns.saturating_sub(begun_ns);
        if lost {
            self.fail("the guest's memory could not be frozen for a capture".into());
        }
        let (state, frozen) = result?;
        Capture::new(&state, frozen, pause_ns)
    }

    /// Starts KVM's dirty log for a VM that is captured repeatedly, while its guest runs, so that
    /// its next captures are shorter.
    pub fn prepare_captures(&mut self) {
        // While memory is missing, a vCPU may hold RAM's lock until a pager comes.
        let runs = matches!(self.phase, Phase::Starting | Phase::Running { .. });
        if runs && self.supply.is_complete() && self.ram.wants_log() {
            self.ram.keep_log(&self.vm);
        }
    }

    /// The ranges that its guest has written since its last capture, or since it was restored.
    ///
    /// # Errors
    ///
    /// As for [`GuestRam::written`]. While memory is missing, as of [`GuestRam::written_at_once`].
    pub fn written(&self) -> io::Result<Vec<Extent>> {
        match self.supply.is_complete() {
            true => self.ram.written(),
            false => self.ram.written_at_once(),
        }
    }

    /// The profile of its guest's processor, once the VM was saved.
    pub fn cpu_profile(&self) -> Option<&Profile> {
        self.profile.as_ref()
    }

    /// KVM's counters, summed over the vCPUs and the VM, and the counters of network interfaces.
    ///
    /// # Errors
    ///
    /// If KVM's statistics can't be read.
    pub fn stats(&self) -> Result<BTreeMap<String, u64>, io::Error> {
        let mut sums = BTreeMap::new();
        for stats in &self.stats {
            stats.add_to(&mut sums)?;
        }
        self.devices.add_net_totals(&mut sums);
        Ok(sums)
    }

    /// Reports what the kernel has noted, if its activity is recorded.
    pub fn report_boot(&self) {
        let Some(NotedCalls { kernel, clock: tsc }) = &self.noted_calls else {
            return;
        };
        let ended_ns = clock::monotonic_ns();
        let notes = calls::read(self.ram.memory());
        let names = elf::functions(kernel, &notes.functions()).unwrap_or_default();
        let spans = notes.spans(&names, tsc, ended_ns);
        self.events.report_kernel(&spans, notes.dropped);
    }

    /// Handles requests that other threads made since the last call. Returns why the VM ends, if it
    /// does.
    pub fn process_events(&mut self) -> Option<Ending> {
        for notice in self.mailbox.take() {
            match notice {
                Notice::Parked | Notice::WorkDone => {}
                Notice::FirstRun { at_ns } => {
                    self.phase.entered();
                    // Lets the guest run first where both share a processor.
                    std::thread::yield_now();
                    self.workers.start_device_jobs();
                    self.events.moment(self.first_entry.moment, at_ns);
                    self.events.flush();
                    // The guest may touch these pages at the same time, which is harmless.
                    let first_writes = std::mem::take(&mut self.first_entry.first_writes);
                    self.ram.copy_ahead(&first_writes);
                    self.supply.guest_runs();
                }
                Notice::Gate { passed } => {
                    if let Some(ending) = self.gate.reported(passed) {
                        self.phase.end(ending);
                    }
                }
                Notice::Ended(ending) => self.phase.end(ending),
                Notice::Spawn(request) => self.workers.serve(request),
            }
        }
        // A guest's own request to end takes precedence over errors of its vCPUs after it.
        if let Some(request) = self.devices.board.power.request() {
            let message = match request {
                PowerRequest::PowerOff => "the guest powered off",
                PowerRequest::Reset => "the guest reset",
            };
            self.phase.end_instead(Ending {
                reason: ExitReason::Shutdown,
                message: message.into(),
            });
        }
        let lost = self.supply.process_events(&self.ram);
        if let Some(ending) = lost.or_else(|| self.gate.overdue()) {
            self.phase.end(ending);
        }
        self.unused.take_if(|(_, at)| *at <= Instant::now());
        self.phase.ending().cloned()
    }

    /// How long [`process_events`](Vmm::process_events) may wait for its next call.
    pub fn timeout(&self) -> Option<Duration> {
        let free = self.unused.as_ref().map(|(_, at)| *at);
        let free = free.map(|at| at.saturating_duration_since(Instant::now()));
        let waits = [self.gate.time_left(), self.supply.timeout(), free];
        waits.into_iter().flatten().min()
    }

    /// Ends the VM because of a failure of the host.
    pub fn fail(&mut self, message: String) {
        self.phase.end(Ending {
            reason: ExitReason::HostError,
            message,
        });
    }

    /// Readable when the pager has sent something.
    pub fn pager(&self) -> Option<BorrowedFd<'_>> {
        self.supply.descriptor()
    }

    /// Whether threads may be blocked for good, because one violated its sandbox or memory is lost.
    /// Then nothing may wait for them or touch guest memory any more.
    pub fn is_stuck(&self) -> bool {
        violation::first().is_some() || self.supply.is_lost()
    }

    /// Readable when [`process_events`](Vmm::process_events) has something to do: notices
    /// of threads, and the guest's request to end.
    pub fn events(&self) -> [&vmm_sys_util::eventfd::EventFd; 2] {
        [self.mailbox.event(), self.devices.board.power.event()]
    }

    /// The VM's id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its devices.
    pub fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Its RAM.
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Runs `work` on the devices, which may need memory that the pager has not fetched yet. `None`
    /// if that memory is lost: then the VM ends.
    pub(crate) fn with_devices<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&Devices) -> T + Send + 'static,
    ) -> Option<T> {
        if self.supply.is_complete() {
            return Some(work(&self.devices));
        }
        let (devices, mailbox) = (self.devices.clone(), self.mailbox.clone());
        let done = run_off_main(
            &mailbox,
            move || work(&devices),
            || {
                self.wait_for_threads();
                self.process_events();
                !self.is_stuck()
            },
        );
        done.unwrap_or_else(|error| {
            self.fail(format!("the devices could not be accessed: {error}"));
            None
        })
    }

    /// Waits until no vCPU is in the guest. Processes events meanwhile: a vCPU may be waiting for a
    /// device's thread, which only this thread can start.
    fn wait_parked(&mut self) {
        while !self.vcpus.iter().all(VcpuThread::is_parked) && !self.is_stuck() {
            self.wait_for_threads();
            self.process_events();
        }
    }

    /// Sleeps until a thread has left a notice or violated its sandbox, or until the pager
    /// has sent something.
    fn wait_for_threads(&self) {
        let mut wait = vec![readable(self.mailbox.event())];
        wait.extend(violation::wakeup().map(readable));
        wait.extend(
            self.pager()
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)),
        );
        let timeout = self.supply.timeout().map(timespec);
        let _ = poll(&mut wait, timeout.as_ref());
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        self.vcpus.iter().for_each(VcpuThread::end);
        self.wait_parked();
        if !self.is_stuck() {
            self.vcpus.drain(..).for_each(VcpuThread::join);
            self.workers.start_device_jobs();
            self.with_devices(Devices::pause);
        }
        if self.is_stuck() {
            // Threads may still use them.
            std::mem::forget((self.ram.clone(), self.devices.clone()));
        }
    }
}
