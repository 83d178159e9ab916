//! Finds and lists VMs, also those that were removed lately.

use super::Node;
use jiffy_content::error::{Error, Result};
use jiffy_vmhost::handle::{Command, VmHandle};
use jiffy_wire::api::Vm;
use jiffy_wire::timeline::Timeline;
use std::sync::Arc;

impl Node {
    /// The VM with this name, id or unique prefix of an id.
    ///
    /// # Errors
    ///
    /// If there is none, several ids begin so, or its record can't be read.
    pub fn find(&self, wanted: &str) -> Result<Arc<VmHandle>> {
        let vm = self.find_any(wanted)?;
        let refusal = vm.view.borrow().refusal.clone();
        refusal.map_or(Ok(vm), Err)
    }

    /// As [`Node::find`], but also a VM whose record can't be read.
    ///
    /// # Errors
    ///
    /// If there is none, or several ids begin so.
    pub fn find_any(&self, wanted: &str) -> Result<Arc<VmHandle>> {
        let vm = self.registry.find(wanted)?;
        match vm.spec.hidden {
            false => Ok(vm),
            true => Err(Error::not_found(format!("There is no VM {wanted}."))),
        }
    }

    /// VMs, the oldest first: all, or those that were started and have not ended.
    pub fn list(&self, all: bool) -> Vec<Arc<VmHandle>> {
        let mut handles = self.registry.all();
        handles.retain(|vm| !vm.spec.hidden && (all || vm.view.borrow().lives()));
        handles
    }

    /// The timeline of a VM, or of one that was removed lately.
    ///
    /// # Errors
    ///
    /// As in [`Node::find_any`], if no such VM was removed lately.
    pub async fn timeline(&self, wanted: &str) -> Result<Timeline> {
        let missing = match self.find_any(wanted) {
            Ok(vm) => match vm.ask(Command::Timeline).await {
                Ok(timeline) => return Ok(timeline),
                Err(error) => error,
            },
            Err(error) => error,
        };
        match self.registry.remembered(wanted) {
            Some((_, timeline)) => Ok(timeline),
            None => Err(missing),
        }
    }

    /// A VM, or the last state of one that was removed lately.
    ///
    /// # Errors
    ///
    /// As in [`Node::find_any`], if no such VM was removed lately.
    pub fn last_seen(&self, wanted: &str) -> Result<Vm> {
        match self.find_any(wanted) {
            Ok(vm) => Ok(vm.vm()),
            Err(error) => match self.registry.remembered(wanted) {
                Some((vm, _)) => Ok(vm),
                None => Err(error),
            },
        }
    }
}
