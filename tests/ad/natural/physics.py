"""Kernels of physics and numerics as first written."""

import math

import numpy as np
from numba import njit, prange

from cpuopt.ops.declaration import BT, B, C, N, T, index, inp, out, scalar, state

from .table import declared

G = 9.81


@declared(out("u", T, C), inp("u0", C), inp("alpha", 1))
def heat_explicit(u, u0, alpha):
    nt, nx = u.shape
    for i in range(nx):
        u[0, i] = u0[i]
    for t in range(nt - 1):
        u[t + 1, 0] = 0.0
        u[t + 1, nx - 1] = 0.0
        for i in range(1, nx - 1):
            u[t + 1, i] = u[t, i] + alpha[0] * (u[t, i + 1] - 2 * u[t, i] + u[t, i - 1])


@declared(state("u", C), inp("nu", 1), scalar("steps", integer=True))
def burgers_in_place(u, nu, steps):
    n = u.shape[0]
    new = np.zeros(n)
    for _ in range(steps):
        for i in range(n):
            left, right = u[i - 1], u[(i + 1) % n]
            new[i] = u[i] - 0.01 * u[i] * (right - left) + nu[0] * (right - 2.0 * u[i] + left)
        for i in range(n):
            u[i] = new[i]


@declared(out("end", 2), inp("u0", C), inp("c", 1))
def wave_equation(end, u0, c):
    n = len(u0)
    prev = np.zeros(n)
    cur = np.zeros(n)
    for i in range(n):
        prev[i] = u0[i]
        cur[i] = u0[i]
    for t in range(4):
        for i in range(1, n - 1):
            nxt = 2 * cur[i] - prev[i] + (0.1 * c[0]) ** 2 * (cur[i + 1] - 2 * cur[i] + cur[i - 1])
            prev[i] = nxt
        for i in range(n):
            cur[i], prev[i] = prev[i], cur[i]
    end[0] = cur[n // 2]
    end[1] = prev[1]


@njit
def lorenz_slope(x, y, z, sigma, rho, beta):
    return sigma * (y - x), x * (rho - z) - y, x * y - beta * z


@declared(out("path", T, 3), inp("start", 3), inp("params", 3))
def lorenz(path, start, params):
    x, y, z = start[0], start[1], start[2]
    sigma, rho, beta = params[0], params[1], params[2]
    dt = 0.01
    for t in range(path.shape[0]):
        dx, dy, dz = lorenz_slope(x, y, z, sigma, rho, beta)
        x, y, z = x + dt * dx, y + dt * dy, z + dt * dz
        path[t, 0], path[t, 1], path[t, 2] = x, y, z


@njit
def acceleration(theta, length):
    return -G / length * math.sin(theta)


@declared(out("theta", N), inp("theta0", N), inp("length", N))
def pendulum_rk4(theta, theta0, length):
    h = 0.05
    for i in prange(theta0.shape[0]):
        a, w = theta0[i], 0.0
        L = 1.0 + length[i] * length[i]
        for _ in range(3):
            k1a, k1w = w, acceleration(a, L)
            k2a, k2w = w + h / 2 * k1w, acceleration(a + h / 2 * k1a, L)
            k3a, k3w = w + h / 2 * k2w, acceleration(a + h / 2 * k2a, L)
            k4a, k4w = w + h * k3w, acceleration(a + h * k3a, L)
            a += h / 6 * (k1a + 2 * k2a + 2 * k3a + k4a)
            w += h / 6 * (k1w + 2 * k2w + 2 * k3w + k4w)
        theta[i] = a


@declared(out("force", BT, 3), inp("pos", BT, 3), inp("mass", BT))
def nbody_forces(force, pos, mass):
    n = pos.shape[0]
    for i in prange(n):
        fx = fy = fz = 0.0
        for j in range(n):
            if i == j:
                continue
            dx = pos[j, 0] - pos[i, 0]
            dy = pos[j, 1] - pos[i, 1]
            dz = pos[j, 2] - pos[i, 2]
            r2 = dx * dx + dy * dy + dz * dz + 0.01
            inv = mass[i] * mass[j] / (r2 * math.sqrt(r2))
            fx += inv * dx
            fy += inv * dy
            fz += inv * dz
        force[i, 0] = fx
        force[i, 1] = fy
        force[i, 2] = fz


@declared(out("energy", 1), inp("pos", BT, 3), scalar("cutoff"))
def lennard_jones(energy, pos, cutoff):
    n = pos.shape[0]
    energy[0] = 0.0
    for i in range(n):
        a = pos[i]
        for j in range(i + 1, n):
            b = pos[j]
            r2 = 0.5
            for k in range(3):
                d = a[k] - b[k]
                r2 += d * d
            if r2 > cutoff * 10:
                continue
            s6 = (1.0 / r2) ** 3
            energy[0] += 4.0 * (s6 * s6 - s6)


@declared(state("q", C), inp("v", C))
def upwind_advection(q, v):
    n = q.shape[0]
    flux = np.zeros(n + 1)
    for i in range(n + 1):
        if i == 0 or i == n:
            flux[i] = 0.0
            continue
        flux[i] = max(v[i], 0.0) * q[i - 1] + min(v[i], 0.0) * q[i]
    for i in range(n):
        q[i] -= 0.1 * (flux[i + 1] - flux[i])


@declared(state("u", T, C), inp("d", 1))
def diffusion_2d(u, d):
    h, w = u.shape
    for step in range(2):
        old = np.empty((h, w))
        for i in range(h):
            for j in range(w):
                old[i, j] = u[i, j]
        for i in range(1, h - 1):
            for j in range(1, w - 1):
                u[i, j] += d[0] * (old[i - 1, j] + old[i + 1, j] + old[i, j - 1] + old[i, j + 1] - 4 * old[i, j])


@declared(out("energy", 1), inp("pos", C, 2), index("a", T, below=C), index("b", T, below=C), inp("rest", T))
def springs(energy, pos, a, b, rest):
    e = 0.0
    for s in range(a.shape[0]):
        i, j = a[s], b[s]
        if i == j:
            continue
        length = math.hypot(pos[i, 0] - pos[j, 0], pos[i, 1] - pos[j, 1])
        e += 0.5 * (length - rest[s]) ** 2
    energy[0] = e


@declared(out("range_", N), inp("speed", N), inp("angle", N))
def projectile_with_drag(range_, speed, angle):
    for p in prange(speed.shape[0]):
        v = 2.0 + abs(speed[p])
        vx = v * math.cos(0.3 * angle[p])
        vy = v * (0.4 + math.sin(0.3 * angle[p]) ** 2)
        x, y = 0.0, 0.0
        for step in range(40):
            s = math.sqrt(vx * vx + vy * vy)
            vx, vy = vx - 0.05 * 0.02 * s * vx, vy - 0.05 * (G + 0.02 * s * vy)
            x += 0.05 * vx
            y += 0.05 * vy
            if y < 0.0:
                break
        range_[p] = x


@declared(out("E", N), inp("M", N), inp("ecc", N))
def kepler_fixed_newton(E, M, ecc):
    for i in prange(M.shape[0]):
        e = 0.9 * np.tanh(ecc[i]) ** 2
        x = M[i]
        for _ in range(8):
            x = x - (x - e * np.sin(x) - M[i]) / (1.0 - e * np.cos(x))
        E[i] = x


@declared(out("E", N), inp("M", N))
def kepler_until_converged(E, M):
    for i in prange(M.shape[0]):
        x = M[i]
        for _ in range(50):
            step = (x - 0.3 * np.sin(x) - M[i]) / (1.0 - 0.3 * np.cos(x))
            x -= step
            if abs(step) < 1e-15:
                break
        E[i] = x


@declared(out("E", N), inp("M", N))
def kepler_while(E, M):
    for i in prange(M.shape[0]):
        x = M[i]
        err = 1.0
        while err > 1e-12:
            step = (x - 0.3 * np.sin(x) - M[i]) / (1.0 - 0.3 * np.cos(x))
            x -= step
            err = abs(step)
        E[i] = x


@declared(out("x", BT, C), inp("lower", C), inp("upper", C), inp("rhs", BT, C))
def thomas(x, lower, upper, rhs):
    n = rhs.shape[1]
    for row in prange(rhs.shape[0]):
        cp = np.zeros(n)
        dp = np.zeros(n)
        cp[0] = upper[0] / 4.0
        dp[0] = rhs[row, 0] / 4.0
        for i in range(1, n):
            m = 4.0 + upper[i] * upper[i] - 0.1 * lower[i] * cp[i - 1]
            cp[i] = 0.1 * upper[i] / m
            dp[i] = (rhs[row, i] - 0.1 * lower[i] * dp[i - 1]) / m
        x[row, n - 1] = dp[n - 1]
        for i in range(n - 2, -1, -1):
            x[row, i] = dp[i] - cp[i] * x[row, i + 1]


def positive_definite(a):
    return {"a": a["a"] @ a["a"].swapaxes(-1, -2) + len(a["a"]) * np.eye(a["a"].shape[-1])}


@declared(out("L", C, C), inp("a", C, C), inputs=positive_definite)
def cholesky(L, a):
    n = a.shape[0]
    for i in range(n):
        for j in range(n):
            if j > i:
                L[i, j] = 0.0
                continue
            s = a[i, j]
            for k in range(j):
                s -= L[i, k] * L[j, k]
            L[i, j] = math.sqrt(s) if i == j else s / L[j, j]


@declared(out("logdet", 1), state("a", C, C), inputs=positive_definite)
def log_determinant_in_place(logdet, a):
    n = a.shape[0]
    logdet[0] = 0.0
    for k in range(n):
        logdet[0] += math.log(abs(a[k, k]))
        for i in range(k + 1, n):
            f = a[i, k] / a[k, k]
            for j in range(k, n):
                a[i, j] -= f * a[k, j]


@declared(out("x", C), inp("a", C, C), inp("b", C), inputs=positive_definite)
def gauss_elimination(x, a, b):
    n = b.shape[0]
    m = np.zeros((n, n + 1))
    for i in range(n):
        for j in range(n):
            m[i, j] = a[i, j]
        m[i, n] = b[i]
    for k in range(n):
        for i in range(k + 1, n):
            f = m[i, k] / m[k, k]
            for j in range(k, n + 1):
                m[i, j] -= f * m[k, j]
    for i in range(n - 1, -1, -1):
        s = m[i, n]
        for j in range(i + 1, n):
            s -= m[i, j] * x[j]
        x[i] = s / m[i, i]


@njit
def quaternion_product(a0, a1, a2, a3, b0, b1, b2, b3):
    w = a0 * b0 - a1 * b1 - a2 * b2 - a3 * b3
    x = a0 * b1 + a1 * b0 + a2 * b3 - a3 * b2
    y = a0 * b2 - a1 * b3 + a2 * b0 + a3 * b1
    z = a0 * b3 + a1 * b2 - a2 * b1 + a3 * b0
    return w, x, y, z


@declared(out("v", N, 3), inp("q", N, 4), inp("p", N, 3))
def rotate_by_quaternion(v, q, p):
    for i in prange(q.shape[0]):
        r = q[i]
        norm = math.sqrt(r[0] ** 2 + r[1] ** 2 + r[2] ** 2 + r[3] ** 2 + 1e-3)
        w, x, y, z = r[0] / norm, r[1] / norm, r[2] / norm, r[3] / norm
        a, b, c, d = quaternion_product(w, x, y, z, 0.0, p[i, 0], p[i, 1], p[i, 2])
        _, vx, vy, vz = quaternion_product(a, b, c, d, w, -x, -y, -z)
        v[i, 0], v[i, 1], v[i, 2] = vx, vy, vz


@njit
def cubic_spline(q):
    if q >= 2.0:
        return 0.0
    if q >= 1.0:
        return 0.25 * (2.0 - q) ** 3
    return 1.0 - 1.5 * q**2 * (1.0 - 0.5 * q)


@declared(out("rho", BT), inp("x", BT, 2), inp("m", BT))
def sph_density(rho, x, m):
    for i in prange(x.shape[0]):
        rho[i] = 0.0
        for j in range(x.shape[0]):
            r = math.sqrt((x[i, 0] - x[j, 0]) ** 2 + (x[i, 1] - x[j, 1]) ** 2 + 1e-4)
            rho[i] += m[j] * cubic_spline(r)


@declared(out("hit", BT), inp("origin", BT, 3), inp("direction", BT, 3), inp("radius", 1))
def ray_sphere(hit, origin, direction, radius):
    for i in prange(origin.shape[0]):
        o = origin[i, :]
        d = direction[i, :]
        a, b, c = 0.0, 0.0, -9.0 * radius[0] ** 2
        for k in range(3):
            a += d[k] * d[k]
            b += 2.0 * o[k] * d[k]
            c += o[k] * o[k]
        disc = b * b - 4.0 * a * c
        if disc < 0:
            hit[i] = 0.0
            continue
        hit[i] = (-b - math.sqrt(disc)) / (2.0 * a)


@declared(out("f", 3, C), inp("f0", 3, C), inp("tau", 1))
def lattice_boltzmann_1d(f, f0, tau):
    n = f0.shape[1]
    weight = np.zeros(3)
    weight[0] = 4.0 / 6.0
    weight[1] = weight[2] = 1.0 / 6.0
    omega = 1.0 / (0.6 + tau[0] ** 2)
    for i in range(n):
        rho = f0[0, i] + f0[1, i] + f0[2, i]
        for k in range(3):
            post = f0[k, i] + omega * (weight[k] * rho - f0[k, i])
            to = (i + (1 if k == 1 else -1 if k == 2 else 0)) % n
            f[k, to] = post


@declared(out("B", N), inp("wavelength", N), inp("T", N))
def planck(B, wavelength, T):
    for i in prange(wavelength.shape[0]):
        lam = 0.5 + abs(wavelength[i])
        B[i] = 1.0 / lam**5 / np.expm1(1.0 / (lam * (0.5 + abs(T[i]))))


@njit
def shallow_flux(h, hu):
    u = hu / h
    return hu, hu * u + 0.5 * G * h * h


@declared(state("h", C), state("hu", C))
def shallow_water_step(h, hu):
    n = h.shape[0]
    fh = np.zeros(n + 1)
    fu = np.zeros(n + 1)
    for i in range(1, n):
        hl, hr = 2.0 + math.tanh(h[i - 1]), 2.0 + math.tanh(h[i])
        a, b = shallow_flux(hl, hu[i - 1])
        c, d = shallow_flux(hr, hu[i])
        fh[i] = 0.5 * (a + c) - 0.5 * (hr - hl)
        fu[i] = 0.5 * (b + d) - 0.5 * (hu[i] - hu[i - 1])
    for i in range(n):
        h[i] -= 0.01 * (fh[i + 1] - fh[i])
        hu[i] -= 0.01 * (fu[i + 1] - fu[i])


@declared(out("polar", N, 2), inp("xy", N, 2))
def to_polar(polar, xy):
    for i in prange(xy.shape[0]):
        x, y = xy[i]
        polar[i, 0] = np.sqrt(x * x + y * y)
        polar[i, 1] = np.arctan2(y, x)


@declared(out("value", N), inp("grid", T, C), inp("px", N), inp("py", N))
def bilinear_interpolation(value, grid, px, py):
    h, w = grid.shape
    for i in prange(px.shape[0]):
        x = min(max(1.0 + px[i], 0.0), w - 1.001)
        y = min(max(1.0 + py[i], 0.0), h - 1.001)
        x0 = int(x)
        y0 = int(y)
        fx, fy = x - x0, y - y0
        top = grid[y0, x0] * (1 - fx) + grid[y0, x0 + 1] * fx
        bottom = grid[y0 + 1, x0] * (1 - fx) + grid[y0 + 1, x0 + 1] * fx
        value[i] = top * (1 - fy) + bottom * fy


@declared(out("E", 1), inp("r", T), inp("De", T), inp("a", T))
def morse_potential(E, r, De, a):
    E[0] = 0
    for i in range(r.shape[0]):
        E[0] += De[i] * (1 - np.exp(-a[i] * (r[i] - 1.5))) ** 2


@declared(out("gamma", N), inp("v", N))
def rapidity(gamma, v):
    for i in prange(v.shape[0]):
        beta = math.tanh(v[i]) * 0.99
        eta = math.atanh(beta)
        gamma[i] = math.cosh(eta) + math.sinh(eta)


@declared(out("n", B, T), inp("decay", T), inp("n0", B, T))
def decay_chain(n, decay, n0):
    for b in range(n0.shape[0]):
        old = n0[b]
        for k in range(n0.shape[1]):
            gain = 0.0
            if k > 0:
                gain = decay[k - 1] * old[k - 1]
            n[b, k] = old[k] + 0.1 * (gain - decay[k] * old[k])


@declared(out("defl", N), inp("x", N), inp("stiffness", 1))
def beam_deflection(defl, x, stiffness):
    for i in prange(x.shape[0]):
        s = np.clip(x[i], 0.0, 1.0)
        defl[i] = s**2 * (6 - 4 * s + s**2) / (24 * (1 + stiffness[0] ** 2))
