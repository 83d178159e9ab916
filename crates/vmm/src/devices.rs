//! The devices of a VM: made from its configuration (or a saved state), put on
//! the buses, and wired to KVM.

use crate::disk_chunks::DiskChunks;
use crate::error::DeviceError;
use crate::events::Events;
use crate::gate;
use crate::irq::LazyPit;
use crate::mailbox::{Mailbox, Notice};
use crate::memory::GuestRam;
use crate::read_notes::ReadNotes;
use crate::vcpu::exit::Board;
use crate::wiring::Wiring;
use jiffy_devices::bus::BusDevice;
use jiffy_devices::fw_cfg::{self, FwCfg, FwCfgFile, FwCfgState};
use jiffy_devices::power::{
    KeyboardController, KeyboardControllerState, PowerPort, PowerSwitch, keyboard_controller,
    power_port,
};
use jiffy_devices::rtc::{self, Rtc, RtcState};
use jiffy_devices::serial::{Serial, SerialState};
use jiffy_devices::trace::{TracePort, TraceState};
use jiffy_devices::virtio::balloon::{Balloon, BalloonArgs, BalloonState, TargetError};
use jiffy_devices::virtio::block::{Block, BlockOptions, BlockState, RateLimit};
use jiffy_devices::virtio::device::{VirtioDevice, Workers};
use jiffy_devices::virtio::entropy::{Entropy, EntropyState};
use jiffy_devices::virtio::mmio::{MmioTransport, MmioTransportState, Wires};
use jiffy_devices::virtio::vsock::{Vsock, VsockArgs, VsockState};
use jiffy_sys::clock;
use jiffy_wire::trace::TRACE_PORT;
use jiffy_wire::vmm::{BalloonStatus, Disk, FwCfgContents, ReadUnits, VmmConfig};
use kvm_ioctls::VmFd;
use std::fs::File;
use std::io::{self, Read};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Marks a guest may write in its life; more are counted, not passed on.
const MARKS_MAX: u64 = 4096;
/// Largest fw_cfg file read from disk.
const FW_CFG_FILE_MAX: u64 = 64 << 20;

/// A device that a bus and others hold.
pub(crate) type Shared<D> = Arc<Mutex<D>>;
/// A virtio device on its bus.
pub(crate) type Virtio<D> = Shared<MmioTransport<D>>;

/// What devices are made from.
pub struct DeviceArgs<'a> {
    /// The VM's configuration.
    pub config: &'a VmmConfig,
    /// KVM's side.
    pub vm: &'a Arc<VmFd>,
    /// Guest RAM.
    pub ram: &'a Arc<GuestRam>,
    /// Where the guest's word about its identity goes.
    pub mailbox: &'a Arc<Mailbox>,
    /// Starts the devices' threads.
    pub workers: &'a Arc<dyn Workers>,
    /// Where marks go.
    pub events: &'a Arc<Events>,
}

/// All devices of a VM.
pub struct Devices {
    /// Buses and what else a vCPU needs.
    pub board: Board,
    /// `virtio_mmio.device=` parameters, one a device.
    pub parameters: String,
    /// COM1, if there is one.
    pub serial: Option<Shared<Serial>>,
    disks: Vec<Virtio<Block>>,
    reads: Option<Arc<ReadNotes>>,
    vsock: Option<Virtio<Vsock>>,
    entropy: Option<Virtio<Entropy>>,
    balloon: Option<Virtio<Balloon>>,
    fw_cfg: Shared<FwCfg>,
    keyboard: Shared<KeyboardController>,
    rtc: Shared<Rtc>,
    trace: Shared<TracePort>,
}

/// What a snapshot keeps of all devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevicesState {
    /// In the order of the configuration.
    pub disks: Vec<(MmioTransportState, BlockState)>,
    /// If there is one.
    pub vsock: Option<(MmioTransportState, VsockState)>,
    /// If there is one.
    pub entropy: Option<(MmioTransportState, EntropyState)>,
    /// If there is one.
    pub balloon: Option<(MmioTransportState, BalloonState)>,
    /// If there is one.
    pub serial: Option<SerialState>,
    /// Files and position.
    pub fw_cfg: FwCfgState,
    /// The keyboard controller.
    pub keyboard: KeyboardControllerState,
    /// The PC's clock.
    pub rtc: RtcState,
    /// The trace port.
    pub trace: TraceState,
}

impl Devices {
    /// Makes them, or, given a state, makes them as they were saved: paused.
    /// `wires` are those made [ahead](crate::wiring::ahead), or none.
    pub fn create(
        args: &DeviceArgs<'_>,
        wires: Vec<Wires>,
        state: Option<&DevicesState>,
    ) -> Result<Devices, DeviceError> {
        let config = args.config;
        if let Some(state) = state {
            state.fits(config)?;
        }
        let power = Arc::new(PowerSwitch::new().map_err(DeviceError::Event)?);
        let mut wiring = Wiring::new(args, wires);

        let mut disks = Vec::with_capacity(config.disks.len());
        let mut reads = None;
        for (number, disk) in config.disks.iter().enumerate() {
            let options = block_options(disk);
            let state = state.map(|state| &state.disks[number]);
            let device = match state {
                None => Block::open(&options)?,
                Some((_, state)) => Block::restore(&options, state)?,
            };
            let chunks = DiskChunks::open(disk, device.save().bytes, args.events)?;
            let device = match chunks {
                None if disk.note_reads => {
                    let notes = reads.get_or_insert_with(Arc::<ReadNotes>::default);
                    device.on_demand(notes.clone())
                }
                None => device,
                Some(chunks) => device.on_demand(Arc::new(chunks)),
            };
            disks.push(wiring.add(device, state.map(|state| &state.0))?);
        }
        let vsock = match &config.vsock {
            None => None,
            Some(vsock) => {
                let state = state.and_then(|state| state.vsock.as_ref());
                let vsock = VsockArgs {
                    cid: vsock.cid,
                    path: vsock.path.clone(),
                };
                let device = match state {
                    None => Vsock::new(vsock)?,
                    Some((_, state)) => Vsock::restore(vsock, state)?,
                };
                Some(wiring.add(device, state.map(|state| &state.0))?)
            }
        };
        let entropy = match config.rng {
            false => None,
            true => {
                let state = state.and_then(|state| state.entropy.as_ref());
                let device = match state {
                    None => Entropy::new(),
                    Some((_, state)) => Entropy::restore(state),
                };
                Some(wiring.add(device, state.map(|state| &state.0))?)
            }
        };

        let balloon = match config.balloon {
            false => None,
            true => {
                let state = state.and_then(|state| state.balloon.as_ref());
                let balloon = BalloonArgs {
                    ram_bytes: args.ram.size(),
                    reclaim: args.ram.clone(),
                };
                let device = match state {
                    None => Balloon::new(balloon),
                    Some((_, state)) => Balloon::restore(balloon, state)?,
                };
                Some(wiring.add(device, state.map(|state| &state.0))?)
            }
        };

        let serial = match &config.serial {
            None => None,
            Some(serial) => {
                Some(wiring.add_serial(serial, state.and_then(|state| state.serial.as_ref()))?)
            }
        };
        let fw_cfg = match state {
            None => FwCfg::new(fw_cfg_files(config)?, args.ram.memory().clone())?,
            Some(state) => FwCfg::restore(args.ram.memory().clone(), &state.fw_cfg)?,
        };
        let (events, mailbox) = (args.events.clone(), args.mailbox.clone());
        let sink = Box::new(move |mark| {
            events.mark(mark, clock::monotonic_ns());
            if let Some(passed) = gate::verdict(mark) {
                mailbox.push(Notice::Gate { passed });
            }
        });
        let trace = match state {
            None => TracePort::new(MARKS_MAX, sink),
            Some(state) => TracePort::restore(MARKS_MAX, sink, &state.trace),
        };
        let keyboard = state.map(|state| state.keyboard).unwrap_or_default();
        let rtc = state.map(|state| state.rtc).unwrap_or_default();
        let fw_cfg = shared(fw_cfg);
        let trace = shared(trace);
        let keyboard = shared(KeyboardController::restore(power.clone(), &keyboard));
        let rtc = shared(Rtc::restore(&rtc));
        let ports: [(u64, u64, Shared<dyn BusDevice>); 5] = [
            (fw_cfg::PORT, fw_cfg::PORTS, fw_cfg.clone()),
            (TRACE_PORT.into(), 1, trace.clone()),
            (
                keyboard_controller::PORT,
                keyboard_controller::PORTS,
                keyboard.clone(),
            ),
            (
                power_port::PORT,
                power_port::PORTS,
                shared(PowerPort::new(power.clone())),
            ),
            (rtc::PORT, rtc::PORTS, rtc.clone()),
        ];
        for (start, length, device) in ports {
            wiring.ports.insert(start, length, device)?;
        }
        Ok(Devices {
            board: Board {
                ports: Arc::new(wiring.ports),
                mmio: Arc::new(wiring.mmio),
                pit: Arc::new(LazyPit::new(args.vm.clone())),
                power,
            },
            parameters: wiring.parameters,
            serial,
            disks,
            reads,
            vsock,
            entropy,
            balloon,
            fw_cfg,
            keyboard,
            rtc,
            trace,
        })
    }

    /// What was read of the disk whose reads are noted.
    pub fn reads(&self) -> Option<ReadUnits> {
        Some(self.reads.as_ref()?.units())
    }

    /// Stops all devices; requests being worked on are finished. No vCPU runs.
    pub fn pause(&self) {
        self.each_transport(|transport| transport.pause());
    }

    /// Starts them again. A device that can't start tells its driver.
    pub fn resume(&self) {
        self.each_transport(|transport| transport.resume());
        if let Some(serial) = &self.serial {
            lock(serial).repeat();
        }
    }

    /// The state of all devices, which are paused.
    pub fn save(&self) -> Result<DevicesState, DeviceError> {
        Ok(DevicesState {
            disks: self
                .disks
                .iter()
                .map(|disk| {
                    let disk = lock(disk);
                    Ok((disk.save()?, disk.device().save()))
                })
                .collect::<Result<_, DeviceError>>()?,
            vsock: match &self.vsock {
                None => None,
                Some(vsock) => {
                    let vsock = lock(vsock);
                    Some((vsock.save()?, vsock.device().save()))
                }
            },
            entropy: match &self.entropy {
                None => None,
                Some(entropy) => {
                    let entropy = lock(entropy);
                    Some((entropy.save()?, entropy.device().save()))
                }
            },
            balloon: match &self.balloon {
                None => None,
                Some(balloon) => {
                    let balloon = lock(balloon);
                    Some((balloon.save()?, balloon.device().save()))
                }
            },
            serial: self.serial.as_ref().map(|serial| lock(serial).save()),
            fw_cfg: lock(&self.fw_cfg).save(),
            keyboard: lock(&self.keyboard).save(),
            rtc: lock(&self.rtc).save(),
            trace: lock(&self.trace).save(),
        })
    }

    /// Puts other contents in place of those of these files of fw_cfg.
    pub fn replace_fw_cfg(&self, files: Vec<FwCfgFile>) -> Result<(), DeviceError> {
        Ok(lock(&self.fw_cfg).replace(files)?)
    }

    /// Lets a file of fw_cfg be made anew whenever the guest selects it.
    pub fn refresh_fw_cfg(&self, name: &str, refresh: fw_cfg::Refresh) {
        lock(&self.fw_cfg).refresh_on_select(name, refresh);
    }

    /// Tells the balloon, if there is one, how many MiB it shall hold.
    pub fn set_balloon(&self, target_mib: u32) -> Option<Result<(), TargetError>> {
        let balloon = self.balloon.as_ref()?;
        Some(lock(balloon).device_mut().set_target(target_mib))
    }

    /// What the balloon holds, and the newest figures the guest has given;
    /// asks for newer ones.
    pub fn balloon(&self) -> Option<BalloonStatus> {
        let mut balloon = lock(self.balloon.as_ref()?);
        let balloon = balloon.device_mut();
        balloon.request_statistics();
        let stats = balloon.statistics().latest().by_name();
        Some(BalloonStatus {
            target_mib: balloon.target_mib(),
            actual_mib: balloon.actual_mib(),
            reported_bytes: balloon.reported_bytes(),
            stats: stats
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect(),
        })
    }

    fn each_transport(&self, mut act: impl FnMut(&mut dyn Transport)) {
        for disk in &self.disks {
            act(&mut *lock(disk));
        }
        if let Some(vsock) = &self.vsock {
            act(&mut *lock(vsock));
        }
        if let Some(entropy) = &self.entropy {
            act(&mut *lock(entropy));
        }
        if let Some(balloon) = &self.balloon {
            act(&mut *lock(balloon));
        }
    }
}

impl DevicesState {
    /// Whether the state is of a VM with these devices.
    fn fits(&self, config: &VmmConfig) -> Result<(), DeviceError> {
        let differs = if self.disks.len() != config.disks.len() {
            "disks"
        } else if self.vsock.is_some() != config.vsock.is_some() {
            "a vsock device"
        } else if self.entropy.is_some() != config.rng {
            "an entropy device"
        } else if self.balloon.is_some() != config.balloon {
            "a balloon"
        } else if self.serial.is_some() != config.serial.is_some() {
            "a serial port"
        } else {
            return Ok(());
        };
        Err(DeviceError::StateDiffers(differs))
    }
}

/// A transport, whatever is behind it.
trait Transport {
    fn pause(&mut self);
    fn resume(&mut self);
}

impl<D: VirtioDevice> Transport for MmioTransport<D> {
    fn pause(&mut self) {
        MmioTransport::pause(self);
    }

    fn resume(&mut self) {
        // The transport has logged why, and tells the driver.
        let _ = MmioTransport::resume(self);
    }
}

fn block_options(disk: &Disk) -> BlockOptions {
    BlockOptions {
        path: disk.path.clone(),
        read_only: disk.read_only,
        direct: disk.direct,
        id: disk.serial.clone().unwrap_or_default(),
        limit: RateLimit {
            bytes_per_second: disk.limit.bytes_per_second,
            operations_per_second: disk.limit.operations_per_second,
        },
    }
}

/// The files the configuration gives the guest, read.
pub fn fw_cfg_files(config: &VmmConfig) -> Result<Vec<FwCfgFile>, DeviceError> {
    config
        .fw_cfg
        .iter()
        .map(|file| {
            let contents = match &file.contents {
                FwCfgContents::Text(text) => text.clone().into_bytes(),
                FwCfgContents::File(path) => {
                    read_bounded(path).map_err(|source| DeviceError::FwCfgRead {
                        path: path.clone(),
                        source,
                    })?
                }
            };
            Ok(FwCfgFile {
                name: file.name.clone(),
                contents,
            })
        })
        .collect()
}

fn read_bounded(path: &std::path::Path) -> io::Result<Vec<u8>> {
    let mut contents = Vec::new();
    File::open(path)?
        .take(FW_CFG_FILE_MAX + 1)
        .read_to_end(&mut contents)?;
    if contents.len() as u64 > FW_CFG_FILE_MAX {
        return Err(io::Error::other(format!(
            "it is larger than {} MiB",
            FW_CFG_FILE_MAX >> 20
        )));
    }
    Ok(contents)
}

pub(crate) fn shared<D>(device: D) -> Shared<D> {
    Arc::new(Mutex::new(device))
}

fn lock<D>(device: &Mutex<D>) -> MutexGuard<'_, D> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}
