//! What a captured VM is restored from.

use serde::{Deserialize, Serialize, Serializer};
use std::path::PathBuf;

/// A captured VM to restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Restore {
    /// Captured state of vCPUs, interrupt controllers and devices.
    pub state: Source,
    /// Its RAM.
    pub memory: SavedMemory,
    /// Ranges of RAM that the VM is expected to write first, as its parent reported with
    /// [`Written`]. The VMM gives them pages of their own before the VM runs.
    ///
    /// [`Written`]: super::control::ControlRequest::Written
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefault: Vec<Extent>,
    /// Ranges of RAM that the VM is expected to read. A VMM that holds a VM maps them for the guest
    /// as well, so that it does not fault there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub map_ahead: Vec<Extent>,
    /// Reads only the pages of mapped RAM that are accessed, and none around them: afterwards the
    /// page cache has just these.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_readahead: bool,
    /// The guest's new identity. Without one it keeps the old identity, which is right only for a
    /// guest without `jiffy-init`.
    #[serde(default)]
    pub generation: Option<NewGeneration>,
    /// An empty file: a byte is written to it, and to the disk, when the guest passes its gate. From
    /// then on the captured state is older than the VM's disks and must not be restored again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate_record: Option<PathBuf>,
    /// Prepare everything, but do not enter the guest before [`ControlRequest::Begin`](super::ControlRequest::Begin), which comes
    /// with the VM's configuration.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hold: bool,
}

impl Restore {
    /// The numbers of all descriptors in it.
    pub fn descriptors(&mut self) -> impl Iterator<Item = &mut i32> {
        let (layers, layout) = match &mut self.memory {
            SavedMemory::Mapped { layers, layout } => (layers.as_mut_slice(), layout.as_mut()),
            SavedMemory::Paged { .. } => (&mut [][..], None),
        };
        let sources = layers.iter_mut().chain(layout).chain([&mut self.state]);
        sources.filter_map(|source| match source {
            Source::Fd(number) => Some(number),
            Source::Path(_) => None,
        })
    }

    /// From the descriptors of [`ControlResponse::Captured`](super::ControlResponse::Captured), by number, which the VMM must
    /// inherit. `None` if there are too few.
    pub fn of_captured(fds: &[i32]) -> Option<Restore> {
        let [state, layout, layers @ ..] = fds else {
            return None;
        };
        Some(Restore {
            state: Source::Fd(*state),
            memory: SavedMemory::Mapped {
                layers: layers.iter().copied().map(Source::Fd).collect(),
                layout: Some(Source::Fd(*layout)),
            },
            prefault: Vec::new(),
            map_ahead: Vec::new(),
            no_readahead: false,
            generation: None,
            gate_record: None,
            hold: false,
        })
    }
}

/// A file, by path or as an inherited descriptor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// By path.
    Path(PathBuf),
    /// By number.
    Fd(i32),
}

/// Location of captured RAM. Nothing is read in advance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SavedMemory {
    /// Sparse files as long as RAM, mapped privately; the VM never writes to them. A later layer
    /// covers earlier ones where `layout` says so. Without a layout there is one layer, which is
    /// complete.
    Mapped {
        /// The lowest first.
        layers: Vec<Source>,
        /// A [`MemoryLayout`] as JSON.
        #[serde(default)]
        layout: Option<Source>,
    },
    /// A pager serves page faults: the VMM connects to its socket and makes the handshake of
    /// [`crate::pager`].
    Paged {
        /// Unix socket on which the pager listens for this VM.
        socket: PathBuf,
        /// Ask the pager for the part of the image's working set that it has in memory.
        #[serde(default)]
        working_set: bool,
    },
}

/// Which layer holds which part of RAM. Offsets count RAM without the hole below 4 GiB, and are the
/// same in every file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryLayout {
    /// Bytes of RAM, and of every layer.
    pub size: u64,
    /// Ranges that each layer except the lowest (which is complete) covers, lowest layer first;
    /// sorted, in whole pages, without overlap within a layer.
    pub covers: Vec<Vec<Extent>>,
}

/// A range of RAM. Written as `[offset, length]`, because a VMM may read hundreds before its guest
/// runs. A map with the field names is accepted as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

impl Serialize for Extent {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.offset, self.length).serialize(serializer)
    }
}

/// The new identity of a restored guest. The VMM adds a seed and the time, and passes it to the
/// guest as [`crate::guest::GENERATION_NAME`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewGeneration {
    /// A UUID that no other VM has had.
    pub id: String,
    /// Start the first command of the new configuration, in place of one that may run already.
    pub start_main: bool,
    /// Time limit for the guest to take it on, milliseconds; after it the VM ends.
    pub deadline_ms: u32,
}
