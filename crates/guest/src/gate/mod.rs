//! The clone gate: gives a restored guest a new identity before its programs are thawed.
//!
//! Two guests from one memory must not share randomness, clock or identity. Programs are therefore
//! frozen during a capture ([`crate::freezer`]), and before they are thawed the guest reads its
//! [`generation`]. If that is new, the guest applies it; if this fails, programs stay frozen.
//!
//! * [`generation`]: reads and checks it.
//! * `boot_id`: the id of the boot.

mod boot_id;
pub mod generation;

use crate::boot::{self, Teardown, configuration};
use crate::files;
use crate::fw_cfg::FwCfg;
use crate::program::prepare::reason;
use crate::program::process;
use crate::report::Report;
use crate::syscalls;
use alloc::{boxed::Box, format, string::String};
use generation::Checked;
use jiffy_wire::guest::{FW_CFG_NAME, GENERATION_NAME, GuestConfig, MAX_CONFIG};
use rustix::fd::OwnedFd;

/// Result of reading the generation.
#[derive(Debug)]
pub enum Verdict {
    /// The guest was captured, not restored.
    Same,
    /// It was restored.
    New(Box<RestoredGuest>),
}

/// A new generation and its configuration.
#[derive(Debug)]
pub struct RestoredGuest {
    /// The generation.
    pub generation: Checked,
    /// The configuration, if the host gave one.
    pub config: Option<GuestConfig>,
    /// When the guest found that it was restored, guest CLOCK_MONOTONIC, nanoseconds.
    pub entered_ns: u64,
}

/// Reads the generation and, if it differs from `known`, the configuration.
///
/// # Errors
///
/// If fw_cfg can't be read, or the generation or the new configuration is not valid.
pub fn check_generation(source: &FwCfg, known: Option<&str>) -> Result<Verdict, String> {
    let entered_ns = syscalls::monotonic_ns();
    let [generation, config] = source.read_each([
        (GENERATION_NAME, generation::LARGEST),
        (FW_CFG_NAME, MAX_CONFIG),
    ])?;
    let Some(generation) = generation else {
        return Ok(Verdict::Same);
    };
    let generation = generation::parse(&generation)?;
    if known == Some(generation.id.as_str()) {
        return Ok(Verdict::Same);
    }
    let config = config
        .map(|bytes| configuration::parse(&bytes))
        .transpose()?;
    Ok(Verdict::New(Box::new(RestoredGuest {
        generation,
        config,
        entered_ns,
    })))
}

/// Opens the random device for the new seed. Called before the capture.
///
/// # Errors
///
/// If `open` fails.
pub fn random() -> Result<OwnedFd, String> {
    files::open(c"/dev/random").map_err(|error| format!("no /dev/random: {}", reason(error)))
}

/// Applies the new generation, as PID 1.
///
/// # Errors
///
/// If something that two clones must never share can't be replaced: randomness, the time or the
/// boot id. Other failures are reported as at boot.
pub fn apply(
    restored: &RestoredGuest,
    random: &OwnedFd,
    old: &GuestConfig,
    teardown: &mut Teardown,
    report: &mut Report,
) -> Result<(), String> {
    let Checked {
        id,
        seed,
        realtime_ns,
        ..
    } = &restored.generation;
    required_step(report, "randomness", |_| {
        syscalls::reseed(random, seed)
            .map_err(|error| format!("/dev/random refused the seed: {}", reason(error)))
    })?;
    required_step(report, "clock", |_| {
        let elapsed = syscalls::monotonic_ns().saturating_sub(restored.entered_ns);
        syscalls::set_realtime(realtime_ns.saturating_add(elapsed))
            .map_err(|error| format!("it cannot be set: {}", reason(error)))
    })?;
    if !is_same_vm(old, restored.config.as_ref()) {
        boot::machine_id(id, report);
        // If no program has run, nothing has read the boot id, and the kernel generates one at the
        // first read.
        if process::any_was_started() && !old.rehearsal {
            required_step(report, "boot id", |_| boot_id::replace(id))?;
        }
    }
    if let Some(new) = &restored.config {
        boot::reconfigure(old, new, teardown, report);
    }
    Ok(())
}

/// Whether the VM was hibernated: it then has the same id and keeps its boot id. After other
/// restores it is a new VM with a new id.
fn is_same_vm(old: &GuestConfig, new: Option<&GuestConfig>) -> bool {
    new.is_some_and(|new| !new.vm_id.is_empty() && new.vm_id == old.vm_id)
}

/// A step that must succeed before programs are thawed.
fn required_step(
    report: &mut Report,
    name: &str,
    work: impl FnOnce(&mut Report) -> Result<(), String>,
) -> Result<(), String> {
    let mut failure = None;
    report.step(name, |report| {
        work(report).inspect_err(|message| failure = Some(format!("{name}: {message}")))
    });
    failure.map_or(Ok(()), Err)
}
