//! VMs' folders.

use jiffy_content::durable::LoadError;
use jiffy_content::model::vm::{Kept, Root};
use jiffy_content::names;
use jiffy_content::paths::Paths;
use jiffy_content::records;
use jiffy_content::snapshots::saved::Saved;
use jiffy_content::snapshots::{memory, remove_in_background};
use jiffy_sys::durable::{is_full, remove_any};
use jiffy_wire::api::MemoryForm;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A VM that has a folder.
#[derive(Debug)]
pub struct Found {
    /// The folder's name.
    pub id: String,
    /// Its record, or why that can't be read.
    pub record: Result<Kept, LoadError>,
}

/// All VMs that have folders, with their records.
pub fn find(paths: &Paths) -> Vec<Found> {
    let found = ids_in(&paths.vms()).into_iter().map(|id| Found {
        record: records::vm::load(&paths.vm(&id)),
        id,
    });
    found.collect()
}

/// The VMs' ids among the names in a folder.
pub fn ids_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| names::is_id(name))
        .collect()
}

/// Removes all files of a VM. Its data folder is renamed first, so that the VM is never half
/// removed, unless the disk has no room for the name.
///
/// # Errors
///
/// If its data folder can't be renamed or removed; not if there is none.
pub fn remove(paths: &Paths, id: &str) -> io::Result<()> {
    let _ = remove_any(&paths.vm_run(id));
    let gone = paths.vms().join(format!(".gone-{id}"));
    match fs::rename(paths.vm(id), &gone) {
        Ok(()) => remove_any(&gone),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if is_full(&error) => remove_any(&paths.vm(id)),
        Err(error) => Err(error),
    }
}

/// Folder of a hibernated VM's memory.
pub fn hibernated_in(vm_folder: &Path) -> PathBuf {
    vm_folder.join("hibernated")
}

/// Checks that the memory that a VM was hibernated with can be read, without reading all of it; the error is
/// one sentence.
///
/// # Errors
///
/// If a file of it is missing, can't be read, or is of another version: a sentence.
pub fn check_hibernated_memory(vm_folder: &Path, name: &str) -> Result<(), String> {
    let saved = Saved::open(hibernated_in(vm_folder));
    let checked = saved.and_then(|saved| saved.check());
    checked.map_err(|why| format!("The memory of the VM {name} can't be read: {why}."))
}

/// Removes the memory of an earlier hibernation, which a running VM does not need any more. If its
/// root file system is there, that stays: later captures link it, and its image may not be on this
/// node.
pub fn remove_hibernated_memory(vm_folder: &Path, root: Option<&Root>) {
    let folder = hibernated_in(vm_folder);
    if !root.is_some_and(|root| root.path.starts_with(&folder)) {
        let _ = remove_in_background(&folder);
        return;
    }
    for form in [MemoryForm::Image, MemoryForm::Raw] {
        let _ = fs::remove_file(memory::file_in(&folder, form));
    }
    remove_woken_state(vm_folder);
}

/// Can the VM in this folder be woken? Not after its guest has passed the gate of a wake, because its
/// memory on disk is older than its disks then.
pub fn is_asleep(vm_folder: &Path) -> bool {
    let passed = fs::metadata(gate_record(vm_folder)).is_ok_and(|file| file.len() > 0);
    hibernated_in(vm_folder).join("state").exists() && !passed
}

/// The file that is not empty when the guest of the VM in this folder has passed the gate of a wake.
pub fn gate_record(vm_folder: &Path) -> PathBuf {
    hibernated_in(vm_folder).join("passed")
}

/// Removes the state of a VM that is awake, and the note that it is.
pub fn remove_woken_state(vm_folder: &Path) {
    let _ = fs::remove_file(hibernated_in(vm_folder).join("state"));
    let _ = fs::remove_file(gate_record(vm_folder));
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_content::model::vm::{Spec, VmRecord};

    #[test]
    fn a_woken_vm_keeps_its_root_without_the_memory() {
        let vm = tempfile::tempdir().unwrap();
        let folder = hibernated_in(vm.path());
        let of = |path: PathBuf| Root {
            path,
            digest: String::new(),
            lazy: None,
        };
        let names = ["ram.image", "root.erofs", "state"];
        let made = || {
            fs::create_dir_all(&folder).unwrap();
            for name in names {
                fs::write(folder.join(name), "x").unwrap();
            }
        };
        made();
        remove_hibernated_memory(vm.path(), Some(&of(folder.join("root.erofs"))));
        let left = names.map(|name| folder.join(name).exists());
        assert_eq!(left, [false, true, false]);
        made();
        remove_hibernated_memory(vm.path(), Some(&of("/images/base/image.erofs".into())));
        assert!(!folder.exists());
        made();
        remove_hibernated_memory(vm.path(), None);
        assert!(!folder.exists());
    }

    #[test]
    fn only_vm_folders_are_found_even_without_a_record() {
        let data = tempfile::tempdir().unwrap();
        let paths = Paths {
            data: data.path().into(),
            run: data.path().into(),
            lib: data.path().into(),
            share: data.path().into(),
            socket: data.path().into(),
            peer: None,
        };
        let [one, two] = [names::new_id(), names::new_id()];
        for name in [&*one, &*two, ".gone-0123456789ab", "other"] {
            fs::create_dir_all(paths.vm(name)).unwrap();
        }
        let record = VmRecord::new(one.clone(), "web".into(), Spec::default(), 0);
        Kept::from(record).save(&paths.vm(&one)).unwrap();
        let mut found = find(&paths);
        found.sort_by_key(|found| found.record.is_err());
        assert_eq!(found.len(), 2);
        assert_eq!((&found[0].id, &found[1].id), (&one, &two));
        assert_eq!(found[0].record.as_ref().unwrap().record.name, "web");
        assert!(matches!(found[1].record, Err(LoadError::Io(_))));
    }
}
