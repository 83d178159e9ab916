//! Golden snapshots: booted guests kept for later runs.
//!
//! A run that boots queues a request. One background task processes the requests in order: it
//! makes a snapshot of a guest of the same kind that is ready and has no command. The next run of
//! that kind restores it; the guest takes on that run's identity and starts its command.
//!
//! A *kind* is a key: kernel, its command line, initramfs, image, VMM (each by its digest) and
//! shape. A changed kernel or image has another key, so an outdated snapshot is never found. It
//! is removed when its replacement is made.
//!
//! If the image is only partly here, the snapshot has no file of the root file system: a restored
//! VM reads the image as a booting one does, and missing chunks are fetched on demand. Such a
//! snapshot depends on its image and is removed with it.

use crate::spec;
use jiffy_content::clock::monotonic_ns;
use jiffy_content::digests::Digests;
use jiffy_content::model::snapshot::Manifest;
use jiffy_content::model::vm::Spec;
use jiffy_content::snapshots::saved::Saved;
use jiffy_content::snapshots::{remove_atomically, remove_in_background};
use jiffy_sys::causes;
use jiffy_sys::mutex::lock;
use jiffy_vmhost::handle::VmHandle;
use jiffy_vmhost::host::GoldenKeeper;
use jiffy_vmhost::launch::Standby;
use jiffy_vmhost::launch::{Handle, Restoring, SavedRam, command_line};
use jiffy_wire::api::{Origin, Pruned};
use jiffy_wire::cpu::Profile;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;
use tokio::sync::mpsc;
use tracing::{debug, info, warn};

/// Most queued requests for snapshots. Further ones are dropped: frequent runs ask again.
const MAX_QUEUED: usize = 64;
/// Digits of a key in a name.
const NAME_DIGITS: usize = 12;

/// The golden snapshots and standbys of a node.
#[derive(Debug)]
pub struct Goldens {
    folder: PathBuf,
    index: Mutex<Index>,
    requests: mpsc::Sender<Weak<VmHandle>>,
    last_run_ns: AtomicU64,
    /// Most standbys.
    room: usize,
    standbys_wanted: mpsc::Sender<String>,
}

#[derive(Debug, Default)]
struct Index {
    by_key: HashMap<String, Arc<Saved>>,
    /// Standbys with their keys, the least recently wanted one first.
    standbys: Vec<(String, Standby)>,
    /// The id of the standby that is being made.
    standby_begun: Option<String>,
    /// Kinds whose snapshot could not be made or restored: not tried again.
    failed: HashSet<String>,
}

/// Keys of kinds for which a standby is wanted.
pub type StandbyRequests = mpsc::Receiver<String>;

/// VMs that booted, for which golden snapshots are wanted.
pub type SnapshotRequests = mpsc::Receiver<Weak<VmHandle>>;

impl Goldens {
    /// The golden snapshots in this folder, none read yet, with at most `room` standbys; and the
    /// queues of requests for snapshots and standbys.
    pub fn new(folder: PathBuf, room: usize) -> (Goldens, SnapshotRequests, StandbyRequests) {
        let (requests, requested) = mpsc::channel(MAX_QUEUED);
        let (standbys_wanted, wanted) = mpsc::channel(MAX_QUEUED);
        let goldens = Goldens {
            folder,
            index: Mutex::default(),
            requests,
            last_run_ns: AtomicU64::new(0),
            room,
            standbys_wanted,
        };
        (goldens, requested, wanted)
    }

    /// Is any snapshot on disk?
    pub fn any_on_disk(&self) -> bool {
        fs::read_dir(&self.folder).is_ok_and(|mut entries| entries.next().is_some())
    }

    /// Reads the snapshots on disk, and takes over the file digests saved with them. Unusable
    /// ones are removed; `host` is the processor that guests can have here, if that is known.
    pub fn read(&self, digests: &Digests, host: Option<&Profile>) {
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let key = entry.file_name().to_string_lossy().into_owned();
            if key.starts_with('.') {
                continue;
            }
            let folder = entry.path();
            let saved = match Manifest::load(&folder) {
                Ok(manifest) => Saved::new(folder, manifest),
                Err(error) if error.is_newer() => {
                    info!(key, %error, "a golden snapshot of a newer release is ignored");
                    continue;
                }
                Err(error) => {
                    let why = causes::sentence(&error);
                    warn!(
                        golden = key,
                        why, "a golden snapshot can't be used and is removed"
                    );
                    self.discard(&folder, &why);
                    continue;
                }
            };
            // The daemon that made the snapshot was stopped before it tried it.
            if !saved.was_restored() {
                self.discard(&saved.folder, "it was never tried");
            } else if let (Some(guest), Some(host)) = (&saved.manifest.cpu, host)
                && !guest.lacking(host).is_empty()
            {
                self.discard(&saved.folder, "this host has another processor");
            } else if let Err(why) = saved.check() {
                warn!(
                    golden = key,
                    why, "a golden snapshot can't be used and is removed"
                );
                self.discard(&saved.folder, &why);
            } else {
                digests.remember(&saved.manifest.files);
                self.lock().by_key.insert(key, Arc::new(saved));
            }
        }
    }

    /// Is there a snapshot of this kind, or did making one fail?
    pub fn is_settled(&self, key: &str) -> bool {
        let index = self.lock();
        index.by_key.contains_key(key) || index.failed.contains(key)
    }

    /// Adds a new snapshot.
    pub fn add(&self, key: String, saved: Saved) {
        self.lock().by_key.insert(key, Arc::new(saved));
    }

    /// Records that no snapshot of this kind can be made.
    pub fn mark_failed(&self, key: String) {
        self.lock().failed.insert(key);
    }

    /// Time since the last run began.
    pub fn since_last_run(&self) -> Duration {
        let last = self.last_run_ns.load(Ordering::Relaxed);
        Duration::from_nanos(monotonic_ns().saturating_sub(last))
    }

    /// The snapshot of this kind.
    pub fn find(&self, key: &str) -> Option<Arc<Saved>> {
        self.lock().by_key.get(key).cloned()
    }

    /// All snapshots, the oldest first.
    pub fn all(&self) -> Vec<Arc<Saved>> {
        let mut all: Vec<_> = self.lock().by_key.values().cloned().collect();
        all.sort_by_key(|saved| (saved.manifest.created, saved.folder.clone()));
        all
    }

    /// A VM booted: queues a request for a snapshot of its kind.
    pub fn request_snapshot(&self, vm: &Arc<VmHandle>) {
        if spec::golden(&vm.spec).is_some() {
            let _ = self.requests.try_send(Arc::downgrade(vm));
        }
    }

    /// Records that a run began.
    pub fn note_run(&self) {
        self.last_run_ns.store(monotonic_ns(), Ordering::Relaxed);
    }

    /// Removes a snapshot by name; false if there is none.
    pub async fn remove(&self, name: &str) -> bool {
        let taken = self.take(|saved| name_of(saved) == name);
        let is_there = !taken.is_empty();
        remove_now(taken).await;
        is_there
    }

    /// An image was removed or replaced: removes its snapshots.
    pub fn forget_image(&self, image: &str) {
        for (_, saved) in self.take(|saved| saved.manifest.spec.image == image) {
            self.discard(&saved.folder, "its image was removed or replaced");
        }
    }

    /// Removes all snapshots, and allows kinds that failed to be tried again.
    pub async fn prune(&self) -> Pruned {
        let mut pruned = Pruned::default();
        let taken = self.take(|_| true);
        for (_, saved) in &taken {
            pruned.bytes += saved.manifest.memory_bytes + saved.manifest.other_bytes;
            pruned.names.push(name_of(saved));
        }
        self.lock().failed.clear();
        pruned.names.sort();
        remove_now(taken).await;
        pruned
    }

    /// Takes the standby for a run of this kind, if there is one that waits, and asks for another
    /// to be made.
    pub fn take_standby(&self, key: &str) -> Option<Standby> {
        let _ = self.standbys_wanted.try_send(key.to_owned());
        let mut index = self.lock();
        let fits = |(of, standby): &(String, Standby)| of == key && standby.waits();
        let at = index.standbys.iter().position(fits)?;
        let (_, standby) = index.standbys.remove(at);
        drop(index);
        standby.lives().then_some(standby)
    }

    /// Ids of all standbys, including the one that is being made.
    pub fn standbys(&self) -> Vec<String> {
        let index = self.lock();
        let ready = index.standbys.iter().map(|(_, standby)| standby.id.clone());
        ready.chain(index.standby_begun.clone()).collect()
    }

    /// A standby with this id is being made.
    pub fn note_standby_begun(&self, id: &str) {
        self.lock().standby_begun = Some(id.to_owned());
    }

    /// The standby could not be made.
    pub fn note_standby_failed(&self) {
        self.lock().standby_begun = None;
    }

    /// The snapshot to make a standby from, if one of this kind is missing.
    pub fn snapshot_for_standby(&self, key: &str) -> Option<Arc<Saved>> {
        let mut index = self.lock();
        index.standbys.retain(|(_, standby)| standby.lives());
        let has = index.standbys.iter().any(|(of, _)| of == key);
        (self.room > 0 && !has)
            .then(|| index.by_key.get(key).cloned())
            .flatten()
    }

    /// Removes standbys whose VMM died.
    pub fn reap_standbys(&self) {
        self.lock().standbys.retain(|(_, standby)| standby.lives());
    }

    /// Adds a standby, unless its snapshot was removed meanwhile; replaces the least recently
    /// wanted one if there are too many.
    pub fn keep_standby(&self, key: String, saved: &Arc<Saved>, standby: Standby) {
        let mut index = self.lock();
        index.standby_begun = None;
        let current = index.by_key.get(&key);
        if !current.is_some_and(|current| Arc::ptr_eq(current, saved)) {
            return;
        }
        index.standbys.push((key, standby));
        if index.standbys.len() > self.room {
            index.standbys.remove(0);
        }
    }

    /// Takes the standbys that have a lazy disk, to end them: its cache can't be trimmed while it is
    /// open.
    pub fn take_lazy_standbys(&self) -> Vec<Standby> {
        let mut index = self.lock();
        let standbys = std::mem::take(&mut index.standbys);
        let is_lazy = |key: &str| {
            let saved = index.by_key.get(key);
            saved.is_some_and(|saved| saved.manifest.lazy_root.is_some())
        };
        let (lazy, others): (Vec<_>, _) = standbys.into_iter().partition(|(key, _)| is_lazy(key));
        index.standbys = others;
        lazy.into_iter().map(|(_, standby)| standby).collect()
    }

    /// Ends all standbys; the snapshots are kept.
    pub async fn end_standbys(&self) {
        let standbys = std::mem::take(&mut self.lock().standbys);
        for (_, standby) in standbys {
            standby.end().await;
        }
    }

    pub fn take(&self, which: impl Fn(&Saved) -> bool) -> Vec<(String, Arc<Saved>)> {
        let mut index = self.lock();
        let keys: Vec<String> = index
            .by_key
            .iter()
            .filter(|(_, saved)| which(saved))
            .map(|(key, _)| key.clone())
            .collect();
        index.standbys.retain(|(of, _)| !keys.contains(of));
        keys.into_iter()
            .filter_map(|key| Some((key.clone(), index.by_key.remove(&key)?)))
            .collect()
    }

    pub fn discard(&self, folder: &Path, why: &str) {
        debug!(folder = %folder.display(), why, "golden snapshot removed");
        if let Err(error) = remove_in_background(folder) {
            warn!(folder = %folder.display(), %error, "a golden snapshot could not be removed");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Index> {
        lock(&self.index)
    }
}

impl GoldenKeeper for Goldens {
    fn drop_damaged(&self, name: &str) {
        let bad = self.take(|saved| name_of(saved) == name);
        for (key, saved) in bad {
            self.lock().failed.insert(key);
            self.discard(&saved.folder, "it can't be restored");
        }
    }
}

/// Removes the files of these snapshots before it returns.
async fn remove_now(taken: Vec<(String, Arc<Saved>)>) {
    let removed = tokio::task::spawn_blocking(move || {
        for (key, saved) in taken {
            if let Err(error) = remove_atomically(&saved.folder) {
                warn!(key, %error, "a golden snapshot could not be removed");
            }
        }
    });
    let _ = removed.await;
}

/// The name under which a golden snapshot is shown.
pub fn name_of(saved: &Saved) -> String {
    let key = saved.folder.file_name().unwrap_or_default();
    let digits: String = key.to_string_lossy().chars().take(NAME_DIGITS).collect();
    format!("golden-{digits}")
}

/// How a VM is restored from a golden snapshot.
pub fn restoring(saved: &Saved, start_main: bool) -> Restoring {
    let state = Handle::Path(saved.state());
    let memory = SavedRam::of_file(saved.memory());
    Restoring {
        prefault: saved.prefault.clone(),
        map_ahead: saved.accessed.clone(),
        start_main,
        golden: Some(name_of(saved)),
        ..Restoring::new(Some(Origin::Golden), state, memory)
    }
}

/// What a VM of this shape has.
fn parts_of(shape: &Spec) -> String {
    let interface = shape.network.is_some();
    let memory = match shape.max_memory_mib {
        Some(most) => format!("{} of {most}", shape.memory_mib),
        None => shape.memory_mib.to_string(),
    };
    format!("{} {memory} {:?} {interface}", shape.vcpus(), shape.pages)
}

/// Do VMs of these shapes differ only by the contents of their image, kernel and programs? Then a
/// golden snapshot of the one replaces that of the other.
pub fn is_same_kind(one: &Spec, other: &Spec) -> bool {
    let kind = |shape: &Spec| {
        let line = command_line(shape, shape.cpus).ok();
        (line, parts_of(shape))
    };
    (&one.kernel, &one.image) == (&other.kernel, &other.image) && kind(one) == kind(other)
}

/// The key of VMs of this shape, with an image of this id and files with these digests.
pub fn key_of(shape: &Spec, image: &str, digests: &[String]) -> Option<String> {
    let mut hasher = blake3::Hasher::new();
    let line = command_line(shape, shape.cpus).ok()?;
    let parts = parts_of(shape);
    let texts = [env!("CARGO_PKG_VERSION"), &line, &parts, image];
    for text in texts.into_iter().chain(digests.iter().map(String::as_str)) {
        hasher.update(text.as_bytes());
        hasher.update(&[0]);
    }
    Some(hasher.finalize().to_hex()[..32].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_content::model::image::LazyDisk;
    use jiffy_content::model::vm::Root;
    use jiffy_vmhost::network;
    use jiffy_wire::api::CreateVm;
    use std::num::NonZeroU64;

    #[test]
    fn queued_golden_snapshot_keys_are_bounded() {
        let (goldens, _wishes, mut wanted) = Goldens::new("none".into(), 1);
        for run in 0..10_000 {
            assert!(goldens.take_standby(&format!("kind {run}")).is_none());
        }
        assert_eq!(wanted.len(), MAX_QUEUED);
        assert_eq!(wanted.try_recv().unwrap(), "kind 0");
        goldens.take_standby("again");
        assert_eq!(wanted.len(), MAX_QUEUED);
    }

    #[test]
    fn every_input_changes_a_golden_snapshots_key() {
        let shape = |change: fn(&mut CreateVm)| {
            let mut wanted = CreateVm::default();
            change(&mut wanted);
            spec::golden(&spec::of_base(wanted)).unwrap()
        };
        let plain = shape(|_| ());
        let digests = |last: &str| ["k".to_owned(), "i".to_owned(), last.to_owned()];
        let key = |shape: &Spec, image: &str, last: &str| key_of(shape, image, &digests(last));
        let networked = Spec {
            network: Some(network::plain()),
            ..plain.clone()
        };
        let first = key(&plain, "image", "v").unwrap();
        assert_eq!(key(&plain, "image", "v").unwrap(), first);
        assert_eq!(first.len(), 32);
        let others = [
            key(&plain, "other", "v"),
            key(&plain, "image", "w"),
            key(&shape(|vm| vm.cpus = Some(2)), "image", "v"),
            key(&shape(|vm| vm.max_cpus = Some(2)), "image", "v"),
            key(&shape(|vm| vm.memory_mib = Some(256)), "image", "v"),
            key(&networked, "image", "v"),
        ];
        for other in others {
            assert_ne!(other.unwrap(), first);
        }
    }

    #[test]
    fn remote_contents_are_identified_by_chunks_not_claimed_digest() {
        let here = Root {
            path: "image".into(),
            digest: "0".repeat(64),
            lazy: None,
        };
        let chunks = |id: &str, ext4| Root {
            lazy: Some(LazyDisk {
                chunks: vec![id.to_owned(), "p".repeat(32)],
                ext4,
            }),
            ..here.clone()
        };
        let all = [
            here.clone(),
            chunks("a", false),
            chunks("b", false),
            chunks("a", true),
        ];
        let ids: HashSet<String> = all.iter().map(Root::contents_id).collect();
        assert_eq!(ids.len(), all.len(), "{ids:?}");
        let elsewhere = Root {
            digest: "1".repeat(64),
            ..chunks("a", false)
        };
        assert!(ids.contains(&elsewhere.contents_id()));
    }

    #[test]
    fn only_plain_vms_are_eligible_for_golden_snapshots() {
        let eligible = |change: fn(&mut CreateVm)| {
            let mut wanted = CreateVm::default();
            change(&mut wanted);
            spec::golden(&spec::of_base(wanted)).is_some()
        };
        assert!(eligible(|vm| vm.hostname = Some("h".into())));
        assert!(eligible(|vm| vm.remove = true));
        assert!(eligible(
            |vm| vm.root_limit.bytes_per_second = NonZeroU64::new(1)
        ));
        assert!(!eligible(|vm| vm.console = true));
        assert!(!eligible(|vm| vm.cold = true));
        assert!(!eligible(|vm| vm.init = Some(vec!["/sbin/init".into()])));
        assert!(!eligible(|vm| vm.kernel_args = Some("quiet".into())));
        assert!(!eligible(|vm| vm.pages = jiffy_wire::vmm::PageSize::Huge2M));
    }
}
