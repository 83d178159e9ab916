//! Self-confinement of a program that a node starts as its own user, because it needs that user's
//! files, and that reads untrusted data.
//!
//! Its system calls are filtered in addition (`jiffy_sys::seccomp`).
//!
//! Source: landlock(7), capabilities(7).

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd,
    PathFdError, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError,
    RulesetStatus, Scope,
};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs,
};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The newest Landlock ABI that is requested; older kernels apply the rules that they know.
const NEWEST: ABI = ABI::V9;

/// Why a program can't confine itself.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfineError {
    /// A system call failed.
    #[error("{0} failed")]
    System(&'static str, #[source] io::Error),
    /// A folder can't be opened.
    #[error("the folder {0:?} can't be opened")]
    Folder(PathBuf, #[source] PathFdError),
    /// The kernel refuses the rules.
    #[error("the Landlock rules can't be set")]
    Rules(#[from] RulesetError),
}

/// The folders that a confined program may access.
#[derive(Debug, Default)]
pub struct Folders<'a> {
    /// Readable folders, with everything below them. Missing ones are skipped.
    pub readable: &'a [&'a Path],
    /// Folders in which everything is allowed except executing programs and making devices.
    pub writable: &'a [&'a Path],
    /// What it may do with TCP.
    pub tcp: Tcp,
}

/// What a confined program may do with TCP (Linux 6.7).
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Tcp {
    /// Nothing.
    #[default]
    None,
    /// Connect to any port.
    Connect,
}

/// Whether this kernel has Landlock.
pub fn has_landlock() -> bool {
    Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V1))
        .and_then(Ruleset::create)
        .is_ok()
}

/// Hardens this process: no new privileges, no core dump, and memory that only root may inspect.
///
/// # Errors
///
/// If prctl(2) or setrlimit(2) fails; the process may be hardened in part then.
pub fn harden() -> Result<(), ConfineError> {
    set_no_new_privs(true).map_err(failed("setting no-new-privileges"))?;
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, none).map_err(failed("setting the limit of core dumps"))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(failed("making the process not dumpable"))
}

/// Hardens this process, drops all capabilities except root's access to all files
/// (`CAP_DAC_OVERRIDE`), and restricts it to these folders by Landlock. Threads that exist already
/// are not confined.
///
/// Returns false where the kernel has no Landlock: then the folders are not enforced.
///
/// # Errors
///
/// If [`harden`] fails, if the capabilities can't be dropped, if a folder can't be opened (except a
/// missing one of those to be read), or if the kernel refuses the rules. The process may be
/// confined in part then.
pub fn confine(folders: &Folders<'_>) -> Result<bool, ConfineError> {
    harden()?;
    keep(CapabilitySet::DAC_OVERRIDE)?;
    restrict(folders)
}

/// Like [`confine`], for a process that has all its files open already: without any folder, TCP and
/// capability.
///
/// # Errors
///
/// As for [`confine`], but there is no folder.
pub fn seal() -> Result<bool, ConfineError> {
    harden()?;
    keep(CapabilitySet::empty())?;
    restrict(&Folders::default())
}

/// Drops all capabilities except these.
pub(crate) fn keep(wanted: CapabilitySet) -> Result<(), ConfineError> {
    let has = capabilities(None).map_err(failed("reading the capabilities"))?;
    let kept = has.permitted & wanted;
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets).map_err(failed("dropping capabilities"))
}

pub(crate) fn failed(what: &'static str) -> impl Fn(Errno) -> ConfineError {
    move |error| ConfineError::System(what, error.into())
}

fn restrict(folders: &Folders<'_>) -> Result<bool, ConfineError> {
    let mut rules = all_refused(folders.tcp)?;
    for (paths, access) in [(folders.readable, reading()), (folders.writable, writing())] {
        for path in paths {
            let folder = match PathFd::new(path) {
                Ok(folder) => folder,
                // A missing folder needs no rule.
                Err(_) if access == reading() && !path.exists() => continue,
                Err(error) => return Err(ConfineError::Folder((*path).to_owned(), error)),
            };
            rules = rules.add_rule(PathBeneath::new(folder, access))?;
        }
    }
    Ok(rules.restrict_self()?.ruleset != RulesetStatus::NotEnforced)
}

/// Restricts this process to one folder by Landlock. Returns false where the kernel has none.
pub(crate) fn restrict_to(folder: impl AsFd, read_only: bool) -> Result<bool, ConfineError> {
    let access = if read_only { reading() } else { writing() };
    let rules = all_refused(Tcp::None)?.add_rule(PathBeneath::new(folder, access))?;
    Ok(rules.restrict_self()?.ruleset != RulesetStatus::NotEnforced)
}

fn reading() -> BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::ReadDir
}

fn writing() -> BitFlags<AccessFs> {
    let devices = AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::IoctlDev;
    AccessFs::from_all(NEWEST) & !(AccessFs::Execute | AccessFs::ResolveUnix | devices)
}

/// Rules that allow nothing but this of TCP.
fn all_refused(tcp: Tcp) -> Result<RulesetCreated, ConfineError> {
    let rules = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(match tcp {
            Tcp::None => AccessNet::from_all(NEWEST),
            Tcp::Connect => AccessNet::from_all(NEWEST) & !AccessNet::ConnectTcp,
        })?
        .scope(Scope::from_all(NEWEST))?
        .create()?;
    Ok(rules)
}
