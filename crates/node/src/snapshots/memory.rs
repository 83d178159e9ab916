//! RAM of a captured VM, on its way to the disk.

use super::saved::Saved;
use crate::error::{Error, Result};
use crate::vm::capture::Captured;
use jiffy_store::{
    Codec, ImageReader, LayeredFile, Recording, WriteError, WriteOptions, write_image, write_raw,
};
use jiffy_wire::api::MemoryForm;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// How hard snapshots are compressed that are made to be kept.
const LEVEL: i32 = 3;

/// Writes RAM, synced; gives the bytes it takes on disk. Blocking.
pub fn write(target: &Path, form: MemoryForm, captured: &Captured) -> Result<u64> {
    let unreadable = |error: io::Error| {
        Error::vm_failed(format!(
            "The memory of the VM can't be read as its VMM described it: {error}."
        ))
    };
    let layout = captured.layout().map_err(unreadable)?;
    let layers = captured
        .layers
        .iter()
        .map(|layer| Ok(File::from(layer.try_clone()?)))
        .collect::<io::Result<Vec<_>>>()
        .map_err(unreadable)?;
    let source = LayeredFile::new(layers, &layout).map_err(unreadable)?;
    let written = match form {
        MemoryForm::Raw => write_raw(target, &source).map(|_| ()),
        MemoryForm::Image => write_image(target, &source, &options()).map(|_| ()),
    };
    written.map_err(|error| write_failed(target, &error))?;
    bytes_of(target).map_err(|error| Error::io("look at a snapshot", target, &error))
}

fn options() -> WriteOptions {
    WriteOptions {
        codec: Codec::Zstd(LEVEL),
        ..WriteOptions::default()
    }
}

/// Bytes a file takes on disk.
pub fn bytes_of(path: &Path) -> io::Result<u64> {
    Ok(std::fs::metadata(path)?.blocks() * 512)
}

/// One sentence; a full disk is told apart.
pub fn write_failed(target: &Path, error: &WriteError) -> Error {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(error) = cause.downcast_ref::<io::Error>()
            && crate::error::is_full(error)
        {
            return Error::io("write a VM's memory", target, error);
        }
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    Error::internal(format!("The VM's memory can't be written: {text}."))
}

/// Rewrites an image with the chunks first that the recorded restore touched:
/// blocking. After an error it is as it was.
pub fn optimise(saved: &Saved) -> Result<()> {
    let path = saved.memory();
    let unreadable = |why: &dyn std::fmt::Display| {
        Error::internal(format!(
            "What was recorded of the snapshot can't be used: {why}."
        ))
    };
    let recording = Recording::read(&saved.recording()).map_err(|error| unreadable(&error))?;
    let image = ImageReader::open(&path).map_err(|error| unreadable(&error))?;
    jiffy_store::optimise(&image, &recording, &path)
        .map(|_| ())
        .map_err(|error| write_failed(&path, &error))
}
