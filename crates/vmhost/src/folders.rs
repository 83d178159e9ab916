//! A VM's folders.

use jiffy_content::paths::Paths;
use jiffy_sys::durable::remove_any;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Removes all files of a VM. Its data folder is renamed first, so that the VM is never half
/// removed.
pub fn remove(paths: &Paths, id: &str) -> io::Result<()> {
    let _ = remove_any(&paths.vm_run(id));
    let gone = paths.vms().join(format!(".gone-{id}"));
    match fs::rename(paths.vm(id), &gone) {
        Ok(()) => remove_any(&gone),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Folder of a hibernated VM's memory.
pub fn hibernated_in(vm_folder: &Path) -> PathBuf {
    vm_folder.join("hibernated")
}

/// Can the VM in this folder be woken?
pub fn is_asleep(vm_folder: &Path) -> bool {
    hibernated_in(vm_folder).join("state").exists()
}
