//! Finds kernel modules by name, orders them by dependency and strips them.

use super::ImageError;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A module for the initramfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Its name: `kvm-amd`.
    pub name: String,
    /// The relocatable ELF file.
    pub contents: Vec<u8>,
}

/// Reads the modules `wanted` and their dependencies from a folder `lib/modules/VERSION`, in load
/// order. Modules that are built into the kernel are left out.
///
/// # Errors
///
/// If a module is missing or no module, dependencies are nested more than 16 deep, or a file can't
/// be read or unpacked.
pub fn load_all(folder: &Path, wanted: &[&str]) -> Result<Vec<Module>, ImageError> {
    let mut files = BTreeMap::new();
    index(&folder.join("kernel"), &mut files)?;
    let built_in = built_in(folder)?;
    let mut ordered = Vec::new();
    for name in wanted {
        if !built_in.contains(&canonical(name)) {
            add(&files, name, &mut ordered, 0)?;
        }
    }
    Ok(ordered)
}

/// The modules in `modules.builtin`, one path per line (Linux, Documentation/kbuild/kbuild.rst).
fn built_in(folder: &Path) -> Result<BTreeSet<String>, ImageError> {
    let path = folder.join("modules.builtin");
    let text = std::fs::read_to_string(&path).map_err(|error| ImageError::file(&path, error))?;
    let names = text.lines().filter_map(|line| {
        let name = line.rsplit('/').next()?;
        Some(canonical(name.strip_suffix(".ko")?))
    });
    Ok(names.collect())
}

fn index(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<(), ImageError> {
    let entries = std::fs::read_dir(folder).map_err(|error| ImageError::file(folder, error))?;
    for entry in entries {
        let path = entry
            .map_err(|error| ImageError::file(folder, error))?
            .path();
        if path.is_dir() {
            index(&path, files)?;
        } else if let Some(name) = path.file_name().and_then(|name| name.to_str())
            && let Some(stem) = name
                .strip_suffix(".ko.xz")
                .or_else(|| name.strip_suffix(".ko"))
        {
            files.insert(canonical(stem), path);
        }
    }
    Ok(())
}

/// In a module's name the kernel treats `-` and `_` as equal.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

fn add(
    files: &BTreeMap<String, PathBuf>,
    name: &str,
    ordered: &mut Vec<Module>,
    depth: usize,
) -> Result<(), ImageError> {
    let wanted = canonical(name);
    if ordered
        .iter()
        .any(|module| canonical(&module.name) == wanted)
    {
        return Ok(());
    }
    let path = files
        .get(&wanted)
        .ok_or_else(|| ImageError::NoModule(name.into()))?;
    if depth > 16 {
        return Err(ImageError::Module(name.into(), "depends on itself".into()));
    }
    let mut contents = read(path)?;
    let needs = depends(&contents)
        .ok_or_else(|| ImageError::Module(name.into(), "is not a kernel module".into()))?;
    for need in needs {
        add(files, &need, ordered, depth + 1)?;
    }
    strip(&mut contents);
    ordered.push(Module {
        name: name.into(),
        contents,
    });
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>, ImageError> {
    if path.extension().is_none_or(|extension| extension != "xz") {
        return std::fs::read(path).map_err(|error| ImageError::file(path, error));
    }
    let output = Command::new("xz")
        .args(["-dc", "--"])
        .arg(path)
        .output()
        .map_err(|error| ImageError::file(Path::new("xz"), error))?;
    if !output.status.success() {
        return Err(ImageError::file(
            path,
            std::io::Error::other("xz could not unpack it"),
        ));
    }
    Ok(output.stdout)
}

/// The names in `depends=` of the `.modinfo` section.
fn depends(elf: &[u8]) -> Option<Vec<String>> {
    let section = sections(elf)?
        .into_iter()
        .find(|section| section.name == b".modinfo")?;
    let info = elf.get(section.offset..section.offset.checked_add(section.size)?)?;
    let list = info
        .split(|byte| *byte == 0)
        .find_map(|entry| entry.strip_prefix(b"depends="))?;
    let list = std::str::from_utf8(list).ok()?;
    Some(
        list.split(',')
            .filter(|name| !name.is_empty())
            .map(String::from)
            .collect(),
    )
}

/// Sections hidden from the kernel's loader, which finds them by name: BTF and ftrace's lists of
/// functions. In software emulation they take two thirds of a large module's load time, and the
/// machine needs no tracing.
const HIDDEN_SECTIONS: &[&[u8]] = &[
    b".BTF",
    b"__mcount_loc",
    b"_ftrace_events",
    b"_ftrace_eval_map",
];

/// Removes the signature, whose check costs a hash over the whole module and an RSA operation, and
/// hides [`HIDDEN_SECTIONS`].
fn strip(elf: &mut Vec<u8>) {
    const MAGIC: &[u8] = b"~Module signature appended~\n";
    // `struct module_signature` is before the magic; its last field is the signature's length.
    if elf.ends_with(MAGIC) && elf.len() > MAGIC.len() + 12 {
        let end = elf.len() - MAGIC.len();
        let mut length = [0; 4];
        length.copy_from_slice(&elf[end - 4..end]);
        let signature = 12 + u32::from_be_bytes(length) as usize;
        if signature < end {
            elf.truncate(end - signature);
        }
    }
    for section in sections(elf).unwrap_or_default() {
        if HIDDEN_SECTIONS.contains(&section.name.as_slice())
            && let Some(byte) = elf.get_mut(section.name_at)
        {
            *byte = b'-';
        }
    }
}

struct Section {
    /// Offset of the name in the file.
    name_at: usize,
    name: Vec<u8>,
    offset: usize,
    size: usize,
}

/// Parses the section headers of a 64-bit little-endian ELF file; `None` if it is not one.
fn sections(elf: &[u8]) -> Option<Vec<Section>> {
    let u16_at = |at: usize| Some(u16::from_le_bytes(*elf.get(at..)?.first_chunk()?));
    let u32_at = |at: usize| Some(u32::from_le_bytes(*elf.get(at..)?.first_chunk()?));
    let usize_at =
        |at: usize| usize::try_from(u64::from_le_bytes(*elf.get(at..)?.first_chunk()?)).ok();
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let table = usize_at(0x28)?;
    let entry_size = usize::from(u16_at(0x3a)?);
    let count = usize::from(u16_at(0x3c)?);
    let names_index = usize::from(u16_at(0x3e)?);
    let header = |index: usize| table.checked_add(index.checked_mul(entry_size)?);
    let names = usize_at(header(names_index)?.checked_add(0x18)?)?;
    let mut sections = Vec::new();
    for index in 0..count {
        let header = header(index)?;
        let name_at = names.checked_add(u32_at(header)? as usize)?;
        let name = elf.get(name_at..)?.split(|byte| *byte == 0).next()?;
        sections.push(Section {
            name_at,
            name: name.to_vec(),
            offset: usize_at(header.checked_add(0x18)?)?,
            size: usize_at(header.checked_add(0x20)?)?,
        });
    }
    Some(sections)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn damaged_modules_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..400), elf: bool) {
            if elf && bytes.len() > 6 {
                bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
            }
            let _ = depends(&bytes);
            strip(&mut bytes);
        }
    }

    #[test]
    fn module_signatures_are_removed() {
        let mut module = b"body".to_vec();
        module.extend_from_slice(&[0xaa; 20]);
        module.extend_from_slice(&[0; 8]);
        module.extend_from_slice(&20u32.to_be_bytes());
        module.extend_from_slice(b"~Module signature appended~\n");
        strip(&mut module);
        assert_eq!(module, b"body");
    }

    #[test]
    fn a_missing_module_is_named_and_a_built_in_one_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("kernel")).unwrap();
        let builtin = folder.path().join("modules.builtin");
        std::fs::write(&builtin, "kernel/drivers/char/virtio_console.ko\n").unwrap();
        assert_eq!(load_all(folder.path(), &["virtio-console"]).unwrap(), []);
        let error = load_all(folder.path(), &["kvm-amd"]).unwrap_err();
        assert!(error.to_string().contains("kvm-amd"), "{error}");
    }
}
