//! Volumes: list, make, resize, remove.

use super::{Node, run_to_completion};
use jiffy_content::error::{Error, Result};
use jiffy_vmhost::handle::VmHandle;
use jiffy_wire::api::{Action, MakeVolume, ResizedVolume, Subject, VmState, Volume};
use std::sync::Arc;
use tokio::task::block_in_place;

impl Node {
    /// All volumes, with the VMs they belong to.
    ///
    /// # Errors
    ///
    /// If the folder of volumes can't be read.
    pub fn list_volumes(&self) -> Result<Vec<Volume>> {
        let mut volumes = self.volumes.list()?;
        for volume in &mut volumes {
            volume.attached_to = self.owners_of(&volume.name);
        }
        Ok(volumes)
    }

    /// Names of the VMs that a volume belongs to, whether they run or not.
    fn owners_of(&self, volume: &str) -> Vec<String> {
        let mut vms = self.registry.all();
        vms.retain(|vm| uses_volume(vm, volume));
        vms.iter().map(|vm| vm.name.clone()).collect()
    }

    /// Makes a volume of `wanted.size_mib` MiB.
    ///
    /// # Errors
    ///
    /// If the name is not valid or taken, the size is not valid, or there is no disk space.
    pub fn make_volume(&self, name: &str, wanted: &MakeVolume) -> Result<Volume> {
        self.volumes.create(name, wanted.size_mib, wanted.raw)?;
        self.volume_changed(name, Action::Created);
        self.volume(name)
    }

    pub(super) fn volume_changed(&self, name: &str, action: Action) {
        self.host.events.publish(Subject::Volume, action, name);
    }

    fn volume(&self, name: &str) -> Result<Volume> {
        let mut volumes = self.list_volumes()?.into_iter();
        volumes
            .find(|volume| volume.name == name)
            .ok_or_else(|| Error::not_found(format!("There is no volume {name}.")))
    }

    /// Changes the size of a volume that no VM uses, to `size_mib` MiB. Once that has begun, it is
    /// done and told also if the client leaves.
    ///
    /// # Errors
    ///
    /// If there is none, a VM uses it or is hibernated with it, the size is not valid, or there is
    /// no disk space.
    pub async fn resize_volume(
        self: &Arc<Self>,
        name: &str,
        size_mib: u64,
    ) -> Result<ResizedVolume> {
        self.wait_for_removal(|vm| uses_volume(vm, name)).await;
        // A hibernated VM's memory contains the size of its disk.
        let sleeps = |vm: &VmHandle| {
            uses_volume(vm, name) && vm.view.borrow().vm.state == VmState::Hibernated
        };
        if let Some(vm) = self.registry.any(sleeps) {
            return Err(Error::conflict(format!(
                "The volume {name} is in use by the VM {}, which is hibernated.",
                vm.name
            ))
            .hint(format!(
                "Wake that VM with `jiffy wake {0}` and stop it with `jiffy stop {0}`.",
                vm.name
            )));
        }
        let (node, wanted) = (Arc::clone(self), name.to_owned());
        let resized = run_to_completion(async move {
            let note = block_in_place(|| node.volumes.resize(&wanted, size_mib))?;
            node.volume_changed(&wanted, Action::Updated);
            Ok(note)
        });
        let note = resized.await?;
        let volume = self.volume(name)?;
        Ok(ResizedVolume { volume, note })
    }

    /// The error for attaching a disk to an existing VM, or detaching one, which is not
    /// supported.
    pub fn refuse_hot_plug(&self, vm: &str, volume: &str, attach: bool) -> Error {
        let vm = match self.find(vm) {
            Ok(vm) => vm,
            Err(error) => return error,
        };
        if let Err(error) = self.volume(volume) {
            return error;
        }
        let (what, hint) = match attach {
            true => (
                "attached to",
                format!("Make a VM with --disk {volume}, or copy files with `jiffy cp`."),
            ),
            false => (
                "detached from",
                format!(
                    "The volume is free again when the VM is removed with `jiffy rm {}`.",
                    vm.name
                ),
            ),
        };
        Error::wrong_state(format!(
            "The volume {volume} can't be {what} the VM {}: a guest finds its disks when it boots, because virtio-mmio has no hot-plug.",
            vm.name
        ))
        .hint(hint)
    }

    /// Removes a volume.
    ///
    /// # Errors
    ///
    /// If there is none, or it belongs to a VM.
    pub async fn remove_volume(&self, name: &str) -> Result<()> {
        let uses = |vm: &VmHandle| uses_volume(vm, name);
        self.wait_for_removal(uses).await;
        match self.registry.any(uses) {
            // Freeing the blocks of a large file takes seconds.
            None => {
                block_in_place(|| self.volumes.remove(name))?;
                self.volume_changed(name, Action::Removed);
                Ok(())
            }
            Some(vm) => Err(Error::conflict(format!(
                "The volume {name} belongs to the VM {}.",
                vm.name
            ))
            .hint(format!("Remove that VM first with `jiffy rm {}`.", vm.name))),
        }
    }
}

/// Does this VM use the volume itself, not a clone of it?
fn uses_volume(vm: &VmHandle, name: &str) -> bool {
    !vm.spec.own_volumes && vm.spec.disks.iter().any(|disk| disk.name == name)
}
