//! Runtime of a program without a C library: entry point, allocator, the memory functions that the
//! compiler calls, and a panic handler.
//!
//! The process must have only one thread, because the allocator is not thread-safe.
#![allow(unsafe_code)] // Entry point, allocator and memory functions are unsafe by nature.

extern crate alloc;

use alloc::{string::ToString, vec::Vec};
use core::alloc::Layout;
use core::ffi::CStr;
use talc::{
    DefaultBinning,
    base::Talc,
    base::binning::Binning,
    cell::{TalcCell, TalcSyncCell},
    source::Source,
};

core::arch::global_asm!(
    ".globl _start",
    "_start:",
    "xor ebp, ebp",
    "mov rdi, rsp",
    "and rsp, -16",
    "call {main}",
    "ud2",
    main = sym entry,
);

// The compiled `core` and `alloc` refer to these symbols for unwinding, which a program that aborts
// on a panic never does.
core::arch::global_asm!(
    ".globl _Unwind_Resume",
    ".globl rust_eh_personality",
    "_Unwind_Resume:",
    "rust_eh_personality:",
    "ud2",
);

/// Gets the initial stack: argc, argv, NULL, environment, …
unsafe extern "C" fn entry(stack: *const usize) -> ! {
    // SAFETY: the kernel puts argc and argc pointers to C strings there (System V ABI, AMD64
    // supplement, §3.4.1), which exist as long as the process.
    let arguments: Vec<Vec<u8>> = unsafe {
        let count = *stack;
        let pointers = stack.add(1).cast::<*const core::ffi::c_char>();
        (0..count)
            .map(|index| CStr::from_ptr(*pointers.add(index)).to_bytes().to_vec())
            .collect()
    };
    let status = jiffy_guest::start(arguments);
    jiffy_guest::syscalls::exit(status)
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo) -> ! {
    jiffy_guest::emergency(&info.to_string());
    jiffy_guest::syscalls::exit(101)
}

/// Gets memory from the kernel in steps of [`HEAP_STEP`] and never returns it.
#[derive(Debug)]
struct Kernel;

const HEAP_STEP: usize = 256 * 1024;

// SAFETY: `acquire` claims only fresh anonymous memory and never allocates.
unsafe impl Source for Kernel {
    fn acquire<B: Binning>(talc: &mut Talc<Self, B>, layout: Layout) -> Result<(), ()> {
        let need = layout.size().checked_add(layout.align() + 4096).ok_or(())?;
        let length = need.max(HEAP_STEP).next_multiple_of(4096);
        // SAFETY: a new private mapping at an address the kernel chooses.
        let memory = unsafe {
            rustix::mm::mmap_anonymous(
                core::ptr::null_mut(),
                length,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::PRIVATE,
            )
        }
        .map_err(|_| ())?;
        // SAFETY: only the allocator uses the mapping, which is never unmapped.
        unsafe { talc.claim(memory.cast(), length) }
            .map(|_| ())
            .ok_or(())
    }
}

#[global_allocator]
// SAFETY: the process never starts a thread.
static HEAP: TalcSyncCell<Kernel, DefaultBinning> =
    unsafe { TalcSyncCell::new(TalcCell::new(Kernel)) };

// Memory functions that the compiler may call. They move eight bytes per step, which is faster than
// `rep movsb` on processors without FSRM and always on the instruction clock.
core::arch::global_asm!(
    ".globl memcpy",
    ".globl memmove",
    ".globl memset",
    ".globl memcmp",
    ".globl bcmp",
    ".globl strlen",
    // void *memcpy(rdi, rsi, rdx)
    "memcpy:",
    "mov rax, rdi",
    "2:", // forwards
    "cmp rdx, 8",
    "jb 4f",
    "3:",
    "mov rcx, [rsi]",
    "mov [rdi], rcx",
    "add rsi, 8",
    "add rdi, 8",
    "sub rdx, 8",
    "cmp rdx, 8",
    "jae 3b",
    "4:",
    "test rdx, rdx",
    "jz 6f",
    "5:",
    "mov cl, [rsi]",
    "mov [rdi], cl",
    "inc rsi",
    "inc rdi",
    "dec rdx",
    "jnz 5b",
    "6:",
    "ret",
    "memmove:",
    "mov rax, rdi",
    "mov rcx, rdi",
    "sub rcx, rsi",
    "cmp rcx, rdx", // unsigned: the target starts inside the source
    "jae 2b",
    // backwards
    "add rsi, rdx",
    "add rdi, rdx",
    "cmp rdx, 8",
    "jb 8f",
    "7:",
    "mov rcx, [rsi - 8]",
    "mov [rdi - 8], rcx",
    "sub rsi, 8",
    "sub rdi, 8",
    "sub rdx, 8",
    "cmp rdx, 8",
    "jae 7b",
    "8:",
    "test rdx, rdx",
    "jz 6b",
    "9:",
    "mov cl, [rsi - 1]",
    "mov [rdi - 1], cl",
    "dec rsi",
    "dec rdi",
    "dec rdx",
    "jnz 9b",
    "ret",
    // void *memset(rdi, esi, rdx)
    "memset:",
    "mov rax, rdi",
    "movzx esi, sil",
    "movabs rcx, 0x0101010101010101",
    "imul rsi, rcx",
    "cmp rdx, 8",
    "jb 3f",
    "2:",
    "mov [rdi], rsi",
    "add rdi, 8",
    "sub rdx, 8",
    "cmp rdx, 8",
    "jae 2b",
    "3:",
    "test rdx, rdx",
    "jz 5f",
    "4:",
    "mov [rdi], sil",
    "inc rdi",
    "dec rdx",
    "jnz 4b",
    "5:",
    "ret",
    // int memcmp(rdi, rsi, rdx)
    "memcmp:",
    "bcmp:",
    "xor eax, eax",
    "test rdx, rdx",
    "jz 3f",
    "2:",
    "movzx eax, byte ptr [rdi]",
    "movzx ecx, byte ptr [rsi]",
    "sub eax, ecx",
    "jnz 3f",
    "inc rdi",
    "inc rsi",
    "dec rdx",
    "jnz 2b",
    "3:",
    "ret",
    // size_t strlen(rdi)
    "strlen:",
    "xor eax, eax",
    "2:",
    "cmp byte ptr [rdi + rax], 0",
    "je 3f",
    "inc rax",
    "jmp 2b",
    "3:",
    "ret",
);
