//! All VMs of a node: their names, ids and handles. Their state is owned by their tasks.

use crate::handle::VmHandle;
use jiffy_content::error::{Error, Result};
use jiffy_sys::mutex::lock;
use jiffy_wire::api::Vm;
use jiffy_wire::timeline::Timeline;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

/// How many removed VMs keep their last state and timeline, for users of `--rm` who ask
/// afterwards.
const REMEMBERED: usize = 64;
/// The first context id a guest may have (vsock(7)).
const FIRST_CID: u32 = 3;

/// All VMs of a node.
#[derive(Debug, Default)]
pub struct Registry {
    index: Mutex<Index>,
}

#[derive(Debug, Default)]
struct Index {
    by_id: HashMap<String, Arc<VmHandle>>,
    /// The same, the oldest first: sorting a thousand VMs costs as much as listing them.
    by_age: BTreeMap<Age, Arc<VmHandle>>,
    /// Name to id.
    by_name: HashMap<String, String>,
    last_cid: u32,
    gone: VecDeque<(Vm, Timeline)>,
}

/// When a VM was created, its context id, and its id, because a VM whose record can't be read has no
/// context id.
type Age = (u64, u32, String);

fn age(vm: &VmHandle) -> Age {
    (vm.view.borrow().vm.created, vm.cid, vm.id.clone())
}

impl Registry {
    /// A context id that no VM of the node has. It is not reserved until a VM with it is
    /// inserted, but ids are given in turn, so that concurrent calls get different ones.
    pub fn new_cid(&self) -> u32 {
        let mut index = self.lock();
        loop {
            let next = index.last_cid.wrapping_add(1);
            index.last_cid = if (FIRST_CID..u32::MAX).contains(&next) {
                next
            } else {
                FIRST_CID
            };
            let cid = index.last_cid;
            if !index.by_id.values().any(|vm| vm.cid == cid) {
                return cid;
            }
        }
    }

    /// Adds a VM.
    ///
    /// # Errors
    ///
    /// If a VM has the name: that VM.
    pub fn insert(&self, vm: Arc<VmHandle>) -> std::result::Result<(), Arc<VmHandle>> {
        let mut index = self.lock();
        if let Some(holder) = index.named(&vm.name) {
            return Err(holder);
        }
        index.by_name.insert(vm.name.clone(), vm.id.clone());
        index.by_age.insert(age(&vm), Arc::clone(&vm));
        index.by_id.insert(vm.id.clone(), vm);
        Ok(())
    }

    /// Removes a VM; keeps its last state and timeline.
    pub fn remove(&self, vm: Vm, timeline: Timeline) {
        let mut index = self.lock();
        if let Some(handle) = index.by_id.remove(&vm.id) {
            index.by_age.remove(&age(&handle));
        }
        if index.by_name.get(&vm.name) == Some(&vm.id) {
            index.by_name.remove(&vm.name);
        }
        if vm.started.is_none() {
            return;
        }
        index.gone.push_back((vm, timeline));
        if index.gone.len() > REMEMBERED {
            index.gone.pop_front();
        }
    }

    /// The VM with this id.
    pub fn get(&self, id: &str) -> Option<Arc<VmHandle>> {
        self.lock().by_id.get(id).cloned()
    }

    /// The VM of this name.
    pub fn named(&self, name: &str) -> Option<Arc<VmHandle>> {
        self.lock().named(name)
    }

    /// The VM with this id, name or unique prefix of an id. Ids come first, because an earlier
    /// release allowed names that look like ids.
    ///
    /// # Errors
    ///
    /// If no VM matches, or several do.
    pub fn find(&self, wanted: &str) -> Result<Arc<VmHandle>> {
        let index = self.lock();
        let whole = index.by_id.get(wanted).cloned();
        if let Some(vm) = whole.or_else(|| index.named(wanted)) {
            return Ok(vm);
        }
        let mut matches = index
            .by_id
            .values()
            .filter(|vm| !wanted.is_empty() && vm.id.starts_with(wanted));
        match (matches.next(), matches.count()) {
            (Some(vm), 0) => Ok(Arc::clone(vm)),
            (Some(_), more) => Err(Error::invalid(format!(
                "{} VMs have an id that begins with {wanted}.",
                more + 1
            ))
            .hint("Give more digits, or a name.")),
            (None, _) => {
                let shown: String = wanted.chars().take(64).collect();
                Err(Error::not_found(format!("There is no VM {shown}."))
                    .hint("`jiffy ps --all` lists them."))
            }
        }
    }

    /// The last state and timeline of a VM of this name or id that was removed lately.
    pub fn remembered(&self, wanted: &str) -> Option<(Vm, Timeline)> {
        let index = self.lock();
        let newest = |is_it: fn(&Vm, &str) -> bool| {
            let mut gone = index.gone.iter().rev();
            gone.find(|(vm, _)| is_it(vm, wanted)).cloned()
        };
        newest(|vm, id| vm.id == id).or_else(|| newest(|vm, name| vm.name == name))
    }

    /// All VMs, the oldest first.
    pub fn all(&self) -> Vec<Arc<VmHandle>> {
        self.lock().by_age.values().cloned().collect()
    }

    /// A VM that satisfies `holds`, if any.
    pub fn any(&self, holds: impl Fn(&VmHandle) -> bool) -> Option<Arc<VmHandle>> {
        self.lock().by_id.values().find(|vm| holds(vm)).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, Index> {
        lock(&self.index)
    }
}

impl Index {
    fn named(&self, name: &str) -> Option<Arc<VmHandle>> {
        let id = self.by_name.get(name)?;
        self.by_id.get(id).cloned()
    }
}
