//! The parts of a restored VM: its saved state, its RAM, its new identity.

use crate::devices::DevicesState;
use crate::devices::fw_cfg::{self, FwCfgKind};
use crate::error::StartError;
use crate::memory::layers::{self, MAX_LAYERS};
use crate::memory::{GuestRam, MemoryError};
use crate::state::{MAX_ENCODED, VmState};
use jiffy_devices::fw_cfg::{FwCfgFile, FwCfgFileState, Refresh};
use jiffy_sys::{contents, fds, handed};
use jiffy_wire::guest::{self, GENERATION_NAME, Generation};
use jiffy_wire::vmm::{MemoryLayout, NewGeneration, Restore, SavedMemory, Source, VmmConfig};
use std::fs::File;
use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

/// Longest description of layers, bytes of JSON.
const MAX_LAYOUT: u64 = 16 << 20;

/// Reads the saved state and checks it against the configuration.
///
/// # Errors
///
/// If the state can't be read, or belongs to another VM.
pub fn state(restore: &Restore, config: &VmmConfig) -> Result<VmState, StartError> {
    let bytes = read(&restore.state, MAX_ENCODED).map_err(|source| StartError::Host {
        what: "the saved state",
        source,
    })?;
    let state = VmState::decode(&bytes)?;
    check_same("vCPUs", state.vcpus.len() as u64, config.vcpus.into())?;
    let size = u64::from(config.memory.size_mib) << 20;
    check_same("bytes of memory", state.memory_size, size)?;
    Ok(state)
}

/// Maps the saved RAM.
///
/// # Errors
///
/// If there are too many layers, if their layout can't be read or does not fit the RAM, if a file
/// can't be opened or has another size, or if mmap(2) or memfd_create(2) fails.
pub fn memory(restore: &Restore, config: &VmmConfig) -> Result<GuestRam, MemoryError> {
    let size = u64::from(config.memory.size_mib) << 20;
    match &restore.memory {
        SavedMemory::Mapped { layers, layout } => {
            if layers.len() > MAX_LAYERS {
                return Err(MemoryError::Layout("it has too many layers".into()));
            }
            let layout: Option<MemoryLayout> = match layout {
                None => None,
                Some(source) => {
                    let bytes = read(source, MAX_LAYOUT)
                        .map_err(|error| MemoryError::Layout(error.to_string()))?;
                    Some(
                        serde_json::from_slice(&bytes)
                            .map_err(|error| MemoryError::Layout(error.to_string()))?,
                    )
                }
            };
            let files = layers.iter().map(open_memory).collect::<Result<_, _>>()?;
            let ram = GuestRam::from_layers(layers::assemble(files, layout, size)?, size)?;
            if restore.no_readahead {
                ram.disable_readahead();
            }
            Ok(ram)
        }
        SavedMemory::Paged { .. } => GuestRam::to_be_paged(size),
    }
}

/// The devices' state, with changes from the configuration and with the identity that the guest
/// must take on.
///
/// # Errors
///
/// If a fw_cfg file of the configuration can't be read. Without `generation` there is no error.
pub fn devices(
    config: &VmmConfig,
    generation: Option<&mut Refresh>,
    mut state: DevicesState,
) -> Result<DevicesState, StartError> {
    if let Some(generation) = generation {
        let mut files = fw_cfg::files(config)?;
        files.push(FwCfgFile {
            name: GENERATION_NAME.into(),
            contents: generation(),
        });
        let files: Vec<FwCfgFileState> = files
            .into_iter()
            .map(|file| FwCfgFileState {
                name: file.name,
                contents: file.contents,
            })
            .collect();
        for fw_cfg in state.of_mut::<FwCfgKind>() {
            fw_cfg.files = files.clone();
        }
    }
    Ok(state)
}

/// The contents of the generation file, generated at each call with the current time.
///
/// # Errors
///
/// If the host can't provide randomness.
pub fn generation(new: &NewGeneration) -> Result<Refresh, StartError> {
    let mut seed = [0; 64];
    let mut filled = 0;
    while filled < seed.len() {
        filled +=
            rustix::rand::getrandom(&mut seed[filled..], rustix::rand::GetRandomFlags::empty())
                .map_err(|errno| StartError::Host {
                    what: "randomness",
                    source: errno.into(),
                })?;
    }
    let mut generation = Generation {
        version: guest::VERSION,
        id: new.id.clone(),
        seed: seed.iter().map(|byte| format!("{byte:02x}")).collect(),
        realtime_ns: 0,
        start_main: new.start_main,
    };
    Ok(Box::new(move || {
        let since_1970 = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        // It has the same number of digits from 2001 to 2286, so the contents always have the same
        // length.
        generation.realtime_ns = since_1970.as_nanos() as u64;
        serde_json::to_vec(&generation).expect("a generation is plain data")
    }))
}

fn open_memory(source: &Source) -> Result<File, MemoryError> {
    match source {
        Source::Path(path) => {
            handed::open(path).map_err(|error| MemoryError::Open(path.clone(), error))
        }
        Source::Fd(fd) => fds::inherited(*fd)
            .map(File::from)
            .map_err(|_| MemoryError::NoDescriptor(*fd)),
    }
}

/// The contents of a source, at most `limit` bytes.
fn read(source: &Source, limit: u64) -> io::Result<Vec<u8>> {
    let file = match source {
        Source::Path(path) => handed::open(path)?,
        Source::Fd(fd) => fds::inherited(*fd)?.into(),
    };
    contents::of(&file, limit)
}

fn check_same(what: &'static str, saved: u64, configured: u64) -> Result<(), StartError> {
    if saved != configured {
        return Err(StartError::StateDiffers {
            what,
            saved,
            configured,
        });
    }
    Ok(())
}
