//! Captures and restores the VM.

use crate::{Vm, wait_for_release};
use jiffy_sys::fds::send_with_fds;
use jiffy_wire::agent::Command;
use jiffy_wire::lines;
use jiffy_wire::state::{open as unseal, seal};
use jiffy_wire::trace;
use jiffy_wire::vmm::{
    ControlResponse, ExitReason, Extent, MemoryLayout, MemoryStatus, SavedMemory, Source,
};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Most layers of RAM; all are sent in one message.
const MOST_LAYERS: usize = 32;

/// The state of a captured "VM": the contents of its state file.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub struct Saved {
    id: String,
    hostname: String,
    /// The first command, if it ran.
    main: Option<Command>,
    /// How often it was captured, including its ancestors.
    depth: u32,
    /// The memory that its programs may use, MiB.
    usable_mib: Option<u32>,
}

impl Vm {
    pub fn ram_bytes(&self) -> u64 {
        u64::from(self.config.memory.size_mib) << 20
    }

    pub fn capture(&self, stream: &mut UnixStream, resume: bool) -> io::Result<()> {
        if self.script.held_capture {
            File::create("capturing")?;
            wait_for_release();
        }
        if self.script.capture_fails {
            let refusal = ControlResponse::Error("The disk is on fire.".into());
            let answer = lines::encode(&refusal)?;
            return stream.write_all(&answer);
        }
        let depth = self.saved.as_ref().map_or(0, |saved| saved.depth) + 1;
        let main = self.main.lock().unwrap();
        let runs = main.program.is_some() && main.exit.is_none();
        let state = Saved {
            id: self.config.id.clone(),
            hostname: self.guest.hostname.clone().unwrap_or_default(),
            main: self.guest.main.clone().filter(|_| runs),
            depth,
            usable_mib: Some(self.memory.lock().unwrap().usable_mib),
        };
        drop(main);
        let state = seal("0.1.0", &serde_json::to_vec(&state)?);
        let state_file = memfd(&state)?;
        let mut layers = self.layers.lock().unwrap();
        let first = layers.is_empty();
        if layers.len() == MOST_LAYERS {
            // The next layer covers the page of all layers but the first.
            layers.truncate(1);
        }
        // A page at the start, and one that identifies the layer.
        let layer = memfd(&[])?;
        layer.set_len(self.ram_bytes())?;
        layer.write_all_at(&[0x55; 4096], if first { 0 } else { 1 << 20 })?;
        layer.write_all_at(self.config.id.as_bytes(), 1 << 20)?;
        if self.script.filled {
            let mut noise = vec![0; 8 << 20];
            blake3::Hasher::new().finalize_xof().fill(&mut noise);
            layer.write_all_at(&noise, 16 << 20)?;
        }
        layers.push(layer);
        let covers = layers[1..].iter().map(|_| {
            vec![Extent {
                offset: 1 << 20,
                length: 4096,
            }]
        });
        let layout = MemoryLayout {
            size: self.ram_bytes(),
            covers: covers.collect(),
        };
        let layout_file = memfd(&serde_json::to_vec(&layout)?)?;
        self.pause(!resume);
        if self.script.held_capture {
            File::create("captured")?;
        }
        let answer = lines::encode(&ControlResponse::Captured {
            layers: layers.len() as u32,
            pause_ns: 1_000_000,
            copied_bytes: 4096,
        })?;
        let mut files = vec![state_file.as_fd(), layout_file.as_fd()];
        files.extend(layers.iter().map(AsFd::as_fd));
        send_with_fds(&stream, &answer, &files)?;
        if self.script.ends_captured {
            std::process::exit(1);
        }
        Ok(())
    }

    pub fn restore(&mut self) {
        let Some(restore) = self.config.restore.clone() else {
            return;
        };
        let state = match open(&restore.state).and_then(|file| saved_in(&contents(&file)?)) {
            Ok(state) => state,
            Err(error) => {
                let message = format!("The state can't be read: {error}.");
                self.finish(ExitReason::StartFailed, &message)
            }
        };
        // The same ranges as the answer to `Written`.
        for extent in &restore.prefault {
            assert_eq!((extent.offset, extent.length), (1 << 20, 4096));
            eprintln!("fake-vmm: prefault");
        }
        match &restore.memory {
            SavedMemory::Mapped { layers, layout } => {
                let layers: Vec<File> = layers.iter().map(|layer| open(layer).unwrap()).collect();
                if let Some(layout) = layout {
                    let text = contents(&open(layout).unwrap()).unwrap();
                    let layout: MemoryLayout = serde_json::from_slice(&text).unwrap();
                    assert_eq!(layout.covers.len() + 1, layers.len());
                }
                for layer in &layers {
                    assert_eq!(layer.metadata().unwrap().len(), self.ram_bytes());
                }
                let mut id = [0; 12];
                layers
                    .last()
                    .unwrap()
                    .read_exact_at(&mut id, 1 << 20)
                    .unwrap();
                assert_eq!(id, state.id.as_bytes(), "the memory is the state's");
                *self.layers.lock().unwrap() = layers;
            }
            SavedMemory::Paged { socket, .. } => {
                let stream = UnixStream::connect(socket).unwrap();
                std::mem::forget(stream);
            }
        }
        // As the real one, it keeps the balloon that was captured, whatever its configuration says.
        if let Some(mib) = state.usable_mib {
            *self.memory.get_mut().unwrap() = MemoryStatus {
                usable_mib: mib,
                used_mib: mib,
            };
        }
        self.saved = Some(state);
    }

    /// The clone gate.
    pub fn enter(self: &Arc<Self>) {
        let restore = self.config.restore.as_ref().unwrap();
        if let Some(record) = &restore.gate_record {
            crate::jailed::write(record, b"1").unwrap();
        }
        let generation = restore.generation.clone().unwrap();
        assert_eq!(generation.id.len(), 36);
        self.mark(trace::MARK_GATE_ENTERED);
        self.mark(trace::MARK_GATE_PASSED);
        let main = match generation.start_main {
            true => Some(self.guest.main.clone().expect("a command to start")),
            false => self.saved.as_ref().unwrap().main.clone(),
        };
        if let Some(mut main) = main {
            let depth = self.saved.as_ref().unwrap().depth;
            main.env.push(format!("RESTORED={depth}"));
            main.env.push(format!("GENERATION={}", generation.id));
            let hostname = self.guest.hostname.clone().unwrap_or_default();
            main.env.push(format!("HOSTNAME={hostname}"));
            self.start_main(&main);
        }
    }
}

/// The body of a state whose envelope is like that of a real one.
fn saved_in(state: &[u8]) -> io::Result<Saved> {
    let (_, body) = unseal(state).map_err(io::Error::other)?;
    Ok(serde_json::from_slice(body)?)
}

fn memfd(contents: &[u8]) -> io::Result<File> {
    let mut file = jiffy_sys::memfd::create("fake", 0, jiffy_sys::memfd::Pages::Small)?;
    file.write_all(contents)?;
    Ok(file)
}

/// Reads a whole file by offset: a descriptor of a capture is one open file for all children of a
/// fork, which read at the same time. A test may pass a pipe instead.
fn contents(mut file: &File) -> io::Result<Vec<u8>> {
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        return Ok(bytes);
    }
    let mut bytes = vec![0; metadata.len() as usize];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

fn open(source: &Source) -> io::Result<File> {
    match source {
        Source::Path(path) => File::open(path),
        Source::Fd(number) => jiffy_sys::fds::inherited(*number).map(File::from),
    }
}
