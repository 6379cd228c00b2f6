/* One entry for each function of the driver, generated from the lists. Its slot holds the real function's address; before the driver is
 * loaded it holds the stub `guard_lazy`, which loads it (load.c) and retries. An entry changes no argument register, so it needs no
 * prototype. */

#define SLOT(name) .pushsection .data.guard_slots, "aw"; .balign 8; .globl slot_##name; .hidden slot_##name; slot_##name: .quad lazy_##name; .popsection
#define HOOK(name, ...) SLOT(name); LAZY(name)
#define COPY(name, ...) HOOK(name)
#define PAUSE(name, ...) HOOK(name)

#if defined(__x86_64__)

#define LAZY(name) lazy_##name: leaq slot_##name(%rip), %r11; jmp guard_lazy
#define ENTER(name) .globl name; .type name, @function; .balign 16; name: endbr64

#define EXPORT(name) SLOT(name); LAZY(name); ENTER(name); jmpq *slot_##name(%rip); .size name, . - name
#define DENY(name, error) SLOT(name); LAZY(name); ENTER(name); leaq slot_##name(%rip), %rdi; jmp guard_denied; .size name, . - name

/* Calls the C function and preserves every argument register; r11 (the slot) is on the stack on return. */
.macro KEEPING function
  pushq %rbp
  movq %rsp, %rbp
  andq $-16, %rsp
  subq $208, %rsp
  movq %rdi, 0(%rsp)
  movq %rsi, 8(%rsp)
  movq %rdx, 16(%rsp)
  movq %rcx, 24(%rsp)
  movq %r8, 32(%rsp)
  movq %r9, 40(%rsp)
  movq %rax, 48(%rsp)
  movq %r11, 56(%rsp)
  movups %xmm0, 64(%rsp)
  movups %xmm1, 80(%rsp)
  movups %xmm2, 96(%rsp)
  movups %xmm3, 112(%rsp)
  movups %xmm4, 128(%rsp)
  movups %xmm5, 144(%rsp)
  movups %xmm6, 160(%rsp)
  movups %xmm7, 176(%rsp)
  call \function
  movq 0(%rsp), %rdi
  movq 8(%rsp), %rsi
  movq 16(%rsp), %rdx
  movq 24(%rsp), %rcx
  movq 32(%rsp), %r8
  movq 40(%rsp), %r9
  movq 48(%rsp), %rax
  movq 56(%rsp), %r11
  movups 64(%rsp), %xmm0
  movups 80(%rsp), %xmm1
  movups 96(%rsp), %xmm2
  movups 112(%rsp), %xmm3
  movups 128(%rsp), %xmm4
  movups 144(%rsp), %xmm5
  movups 160(%rsp), %xmm6
  movups 176(%rsp), %xmm7
  leave
  jmpq *(%r11)
.endm

#elif defined(__aarch64__)

#define ADDRESS(register, symbol) adrp register, symbol; add register, register, :lo12:symbol
#define LAZY(name) lazy_##name: ADDRESS(x16, slot_##name); b guard_lazy
#define ENTER(name) .globl name; .type name, %function; .balign 16; name: hint #34

#define EXPORT(name) SLOT(name); LAZY(name); ENTER(name); ADDRESS(x16, slot_##name); ldr x17, [x16]; br x17; .size name, . - name
#define DENY(name, error) SLOT(name); LAZY(name); ENTER(name); ADDRESS(x0, slot_##name); b guard_denied; .size name, . - name

.macro KEEPING function
  stp x29, x30, [sp, #-224]!
  mov x29, sp
  stp x0, x1, [sp, #16]
  stp x2, x3, [sp, #32]
  stp x4, x5, [sp, #48]
  stp x6, x7, [sp, #64]
  stp x8, x16, [sp, #80]
  stp q0, q1, [sp, #96]
  stp q2, q3, [sp, #128]
  stp q4, q5, [sp, #160]
  stp q6, q7, [sp, #192]
  bl \function
  ldp q6, q7, [sp, #192]
  ldp q4, q5, [sp, #160]
  ldp q2, q3, [sp, #128]
  ldp q0, q1, [sp, #96]
  ldp x8, x16, [sp, #80]
  ldp x6, x7, [sp, #64]
  ldp x4, x5, [sp, #48]
  ldp x2, x3, [sp, #32]
  ldp x0, x1, [sp, #16]
  ldp x29, x30, [sp], #224
  ldr x17, [x16]
  br x17
.endm

#else
#error "the guard is written for x86_64 and aarch64"
#endif

.text
.hidden guard_load
.hidden guard_denied
guard_lazy: KEEPING guard_load

#ifdef GUARD_NVML
#include "nvml.def"
#include "nvml_exports.def"
#else
#include "hooks.def"
#include "exports.def"
#endif

.section .note.GNU-stack, "", %progbits
