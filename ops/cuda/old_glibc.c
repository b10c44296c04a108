/* What libdeepc_cuda.so asks glibc for under its old name. The CUDA runtime is linked statically and brings references
 * that no header of ours sees, so the linker sends each of these through __wrap_NAME (--wrap, in CMakeLists.txt, which
 * reads this list), a jump to the version that every glibc since 2.2.5 has. See ops/base/glibc.h and
 * docs/lab/old-glibc.md. */
#define OLD(name, version)                                                                         \
  __asm__(".hidden __wrap_" #name "\n.globl __wrap_" #name "\n.type __wrap_" #name ", @function\n" \
          "__wrap_" #name ": jmp *old_" #name "@GOTPCREL(%rip)\n.symver old_" #name ", " #name "@" #version)
OLD(dlclose, GLIBC_2.2.5);
OLD(dlerror, GLIBC_2.2.5);
OLD(dlmopen, GLIBC_2.3.4);
OLD(dlopen, GLIBC_2.2.5);
OLD(dlsym, GLIBC_2.2.5);
OLD(dlvsym, GLIBC_2.2.5);
OLD(pow, GLIBC_2.2.5);
OLD(pthread_condattr_setpshared, GLIBC_2.2.5);
OLD(pthread_create, GLIBC_2.2.5);
OLD(pthread_detach, GLIBC_2.2.5);
OLD(pthread_getspecific, GLIBC_2.2.5);
OLD(pthread_join, GLIBC_2.2.5);
OLD(pthread_key_create, GLIBC_2.2.5);
OLD(pthread_key_delete, GLIBC_2.2.5);
OLD(pthread_kill, GLIBC_2.2.5);
OLD(pthread_mutex_trylock, GLIBC_2.2.5);
OLD(pthread_mutexattr_destroy, GLIBC_2.2.5);
OLD(pthread_mutexattr_init, GLIBC_2.2.5);
OLD(pthread_mutexattr_setpshared, GLIBC_2.2.5);
OLD(pthread_mutexattr_settype, GLIBC_2.2.5);
OLD(pthread_once, GLIBC_2.2.5);
OLD(pthread_rwlock_destroy, GLIBC_2.2.5);
OLD(pthread_rwlock_init, GLIBC_2.2.5);
OLD(pthread_rwlock_rdlock, GLIBC_2.2.5);
OLD(pthread_rwlock_timedrdlock, GLIBC_2.2.5);
OLD(pthread_rwlock_timedwrlock, GLIBC_2.2.5);
OLD(pthread_rwlock_tryrdlock, GLIBC_2.2.5);
OLD(pthread_rwlock_trywrlock, GLIBC_2.2.5);
OLD(pthread_rwlock_unlock, GLIBC_2.2.5);
OLD(pthread_rwlock_wrlock, GLIBC_2.2.5);
OLD(pthread_rwlockattr_destroy, GLIBC_2.2.5);
OLD(pthread_rwlockattr_init, GLIBC_2.2.5);
OLD(pthread_rwlockattr_setpshared, GLIBC_2.2.5);
OLD(pthread_setspecific, GLIBC_2.2.5);
OLD(pthread_spin_destroy, GLIBC_2.2.5);
OLD(pthread_spin_init, GLIBC_2.2.5);
OLD(pthread_spin_lock, GLIBC_2.2.5);
OLD(pthread_spin_trylock, GLIBC_2.2.5);
OLD(pthread_spin_unlock, GLIBC_2.2.5);
OLD(sem_destroy, GLIBC_2.2.5);
OLD(sem_init, GLIBC_2.2.5);
OLD(sem_post, GLIBC_2.2.5);
OLD(sem_timedwait, GLIBC_2.2.5);
OLD(sem_trywait, GLIBC_2.2.5);
OLD(sem_wait, GLIBC_2.2.5);
OLD(shm_open, GLIBC_2.2.5);
OLD(shm_unlink, GLIBC_2.2.5);
